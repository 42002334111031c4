// Markdown as elements. A subset that models write, built node by node: whatever a model says, it stays text.

import { el } from "./dom.js";

const FENCE = /^\s*(```+|~~~+)\s*([\w+#.-]*)\s*$/;
const HEADING = /^(#{1,6})\s+(.*?)\s*#*$/;
const RULE = /^\s*([-*_])(\s*\1){2,}\s*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const QUOTE = /^\s*>\s?(.*)$/;
const SEPARATOR = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const INLINE = new RegExp(
  [
    /(`+)([\s\S]*?[^`])\1(?!`)/, // code
    /\*\*(?=\S)([\s\S]*?\S)\*\*/, // bold
    /\*(?=\S)([\s\S]*?\S)\*/, // italic
    /(?<!\w)_(?=\S)([\s\S]*?\S)_(?!\w)/, // italic
    /~~(?=\S)([\s\S]*?\S)~~/, // struck out
    /\[([^\]]*)\]\(([^)\s]+)\)/, // link
    /(https?:\/\/[^\s<>()]+[^\s<>().,;:!?'"])/, // bare address
  ]
    .map((each) => each.source)
    .join("|"),
);

/** A fragment with the blocks of a text. */
export function markdown(text) {
  const fragment = document.createDocumentFragment();
  const lines = text.replace(/\r\n?/g, "\n").split("\n");
  for (let at = 0; at < lines.length; ) {
    const [node, next] = block(lines, at);
    if (node) fragment.append(node);
    at = next;
  }
  return fragment;
}

function block(lines, at) {
  const line = lines[at];
  if (!line.trim()) return [null, at + 1];
  const fence = line.match(FENCE);
  if (fence) return codeBlock(lines, at, fence);
  const heading = line.match(HEADING);
  // Headings of an answer stand below the page's own.
  if (heading) return [el(`h${Math.min(6, heading[1].length + 2)}`, {}, inline(heading[2])), at + 1];
  if (RULE.test(line)) return [el("hr"), at + 1];
  if (QUOTE.test(line)) return quote(lines, at);
  if (ITEM.test(line)) return list(lines, at);
  if (line.includes("|") && SEPARATOR.test(lines[at + 1] ?? "") && lines[at + 1].includes("-")) return table(lines, at);
  return paragraph(lines, at);
}

function codeBlock(lines, at, [, mark, language]) {
  const body = [];
  let end = at + 1;
  while (end < lines.length && !lines[end].trim().startsWith(mark)) body.push(lines[end++]);
  const label = language ? `Code in ${language}` : "Code";
  return [el("pre", { tabindex: "0", role: "region", "aria-label": label }, el("code", {}, body.join("\n"))), end + 1];
}

function quote(lines, at) {
  const body = [];
  let end = at;
  for (; end < lines.length && QUOTE.test(lines[end]); end++) body.push(lines[end].match(QUOTE)[1]);
  return [el("blockquote", {}, markdown(body.join("\n"))), end];
}

/** Items of one depth; what is indented further belongs to the item before it. */
function list(lines, at) {
  const [, indent, mark] = lines[at].match(ITEM);
  const ordered = /\d/.test(mark);
  const result = el(ordered ? "ol" : "ul", ordered && parseInt(mark, 10) !== 1 ? { start: parseInt(mark, 10) } : {});
  let end = at;
  while (end < lines.length) {
    const item = lines[end].match(ITEM);
    if (!item || item[1].length !== indent.length || /\d/.test(item[2]) !== ordered) break;
    const body = [item[3]];
    for (end++; end < lines.length && belongs(lines, end, indent.length); end++) body.push(lines[end]);
    result.append(el("li", {}, tight(body, indent.length)));
  }
  return [result, end];
}

function belongs(lines, at, indent) {
  const depth = lines[at].match(/^\s*/)[0].length;
  if (lines[at].trim())
    return depth > indent || !(ITEM.test(lines[at]) || HEADING.test(lines[at]) || !lines[at - 1].trim());
  return Boolean(lines[at + 1]?.trim()) && lines[at + 1].match(/^\s*/)[0].length > indent;
}

function tight([first, ...rest], indent) {
  const body = rest.map((line) =>
    line.replace(new RegExp(`^\\s{0,${indent + 4}}`), (space) => space.slice(indent + 2)),
  );
  const nodes = markdown([first, ...body].join("\n"));
  const lead = nodes.firstChild;
  if (lead?.nodeName === "P") lead.replaceWith(...lead.childNodes);
  return nodes;
}

function table(lines, at) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => inline(cell.trim()));
  const head = el("tr", {}, cells(lines[at]).map((cell) => el("th", { scope: "col" }, cell)));
  const body = [];
  let end = at + 2;
  for (; end < lines.length && lines[end].includes("|"); end++) {
    body.push(el("tr", {}, cells(lines[end]).map((cell) => el("td", {}, cell))));
  }
  return [el("table", {}, el("thead", {}, head), el("tbody", {}, body)), end];
}

function paragraph(lines, at) {
  const body = [];
  let end = at;
  do body.push(lines[end++].trim());
  while (
    end < lines.length &&
    lines[end].trim() &&
    ![FENCE, HEADING, QUOTE, ITEM].some((rule) => rule.test(lines[end]))
  );
  return [el("p", {}, inline(body.join("\n"))), end];
}

function inline(text) {
  const nodes = [];
  for (let rest = text; rest; ) {
    const found = rest.match(INLINE);
    if (!found) {
      nodes.push(rest);
      break;
    }
    if (found.index) nodes.push(rest.slice(0, found.index));
    nodes.push(span(found));
    rest = rest.slice(found.index + found[0].length);
  }
  return nodes;
}

function span([whole, , code, strong, star, underline, struck, label, target, bare]) {
  if (code !== undefined) return el("code", {}, code.trim() || code);
  if (strong !== undefined) return el("strong", {}, inline(strong));
  if (star !== undefined || underline !== undefined) return el("em", {}, inline(star ?? underline));
  if (struck !== undefined) return el("s", {}, inline(struck));
  if (bare !== undefined) return link(bare, [bare]);
  return /^(https?:|mailto:)/i.test(target) ? link(target, inline(label)) : whole;
}

const link = (target, children) => el("a", { href: target, rel: "noopener noreferrer", target: "_blank" }, children);
