// Shows Markdown as elements. The library marked reads it into a tree, and the tree becomes nodes one by one: HTML is
// never parsed, so nothing that a model writes can become markup. What colours code, and what sets formulas, is fetched
// with the first of each.

import { Marked } from "../../vendor/marked.esm.mjs";
import { copyButton, el } from "../dom.js";

const SAFE = /^(https?:|mailto:)/i;
const LONGEST_COLOURED = 50_000;

// TeX between \( \), \[ \], $$ $$, and between $ signs that cannot be prices.
const FORMULAS = [/^\\\(([\s\S]+?)\\\)/, /^\$(?![\s$])((?:\\.|[^\\$\n])*?[^\s\\$])\$(?!\d)/];
const DISPLAYED = [/^\$\$([\s\S]+?)\$\$/, /^\\\[([\s\S]+?)\\\]/];

function formula(name, rules) {
  return {
    name,
    level: "inline",
    start: (text) => text.match(/\$|\\[([]/)?.index,
    tokenizer(text) {
      const found = rules.map((rule) => text.match(rule)).find(Boolean);
      return found && { type: name, raw: found[0], text: found[1] };
    },
  };
}

const reader = new Marked({ gfm: true, breaks: true }).use({
  extensions: [formula("formula", FORMULAS), formula("displayed", DISPLAYED)],
  tokenizer: { html: () => undefined, tag: () => undefined }, // there is no HTML: it is text, with its own marks
});

/** A document fragment with the blocks of a text. */
export function markdown(text) {
  const fragment = document.createDocumentFragment();
  try {
    fragment.append(...nodes(reader.lexer(text)));
  } catch {
    fragment.append(el("p", { class: "plain" }, text)); // nested deeper than a stack
  }
  return fragment;
}

const nodes = (tokens = []) => tokens.flatMap((token) => (MAKERS[token.type] ?? plain)(token));
const wrap = (tag) => (token) => [el(tag, {}, nodes(token.tokens))];
const plain = (token) => (token.tokens ? nodes(token.tokens) : [token.text ?? token.raw]);

const MAKERS = {
  space: () => [],
  def: () => [],
  hr: () => [el("hr")],
  br: () => [el("br")],
  paragraph: wrap("p"),
  blockquote: wrap("blockquote"),
  strong: wrap("strong"),
  em: wrap("em"),
  del: wrap("s"),
  codespan: ({ text }) => [el("code", {}, text)],
  code: codeBlock,
  // An answer's headings start at a level below the page's own.
  heading: ({ depth, tokens }) => [el(`h${Math.min(6, depth + 2)}`, {}, nodes(tokens))],
  list: ({ ordered, start, items }) =>
    [el(ordered ? "ol" : "ul", ordered && start !== 1 ? { start } : {}, items.flatMap(item))],
  table: ({ header, rows }) => [
    el("table", { tabindex: "0" }, el("thead", {}, row(header, "th", { scope: "col" })),
      el("tbody", {}, rows.map((cells) => row(cells, "td", {})))),
  ],
  link: ({ href, raw, tokens }) => (SAFE.test(href) ? [link(href, nodes(tokens))] : [raw]),
  // Fetching it would tell its server who reads this.
  image: ({ href, text, raw }) => (SAFE.test(href) ? [link(href, [`[image: ${text || href}]`])] : [raw]),
  formula: (token) => [math(token, false)],
  displayed: (token) => [math(token, true)],
};

function item({ task, checked, tokens }) {
  const box = task ? [el("input", { type: "checkbox", checked, disabled: true }), " "] : [];
  return el("li", task ? { class: "task" } : {}, box, nodes(tokens.filter(({ type }) => type !== "checkbox")));
}

const row = (cells, tag, properties) =>
  el("tr", {}, cells.map(({ align, tokens }) =>
    el(tag, { ...properties, class: align ? `align-${align}` : null }, nodes(tokens))));

const link = (target, children) => el("a", { href: target, rel: "noopener noreferrer", target: "_blank" }, children);

function codeBlock({ text, lang }) {
  const language = (lang ?? "").trim().split(/\s/)[0];
  const label = language ? `Code in ${language}` : "Code";
  const code = el("code", {}, text);
  if (language && text.length <= LONGEST_COLOURED) withLibrary(highlighter, (hljs) => colour(code, hljs, language));
  const shown = el("pre", { tabindex: "0", role: "region", "aria-label": label }, code);
  return [el("div", { class: "code" }, shown, copyButton(() => text, { class: "quiet small" }))];
}

function colour(code, hljs, language) {
  if (!hljs.getLanguage(language)) return;
  const made = (node) =>
    typeof node === "string" ? node : el("span", { class: node.scope ? `code-${node.scope.split(".")[0]}` : null },
      node.children.map(made));
  // The tree of what is coloured, of which the library itself makes HTML.
  const { rootNode } = hljs.highlight(code.textContent, { language, ignoreIllegals: true })._emitter;
  code.replaceChildren(...rootNode.children.map(made));
}

function math({ text, raw }, displayMode) {
  const scrolls = { class: "formula displayed", tabindex: "0", role: "region", "aria-label": "Formula" };
  const place = el("span", displayMode ? scrolls : { class: "formula" }, raw);
  withLibrary(formulas, (katex) => {
    const options = { displayMode, output: "mathml", throwOnError: false, trust: false, maxSize: 20, maxExpand: 200 };
    katex.render(text, place, options);
  });
  return place;
}

/** A library that is fetched when it is first needed; until then what needs it stays as it is. */
class Library {
  constructor(load) {
    this.load = load;
    this.loaded = null;
    this.asked = null;
  }

  fetch() {
    this.asked ??= this.load().then((library) => (this.loaded = library));
    return this.asked;
  }
}

const highlighter = new Library(async () => (await import("../../vendor/highlight.min.mjs")).default);
const formulas = new Library(async () => {
  await import("../../vendor/katex.min.mjs");
  return globalThis.katex;
});

function withLibrary(library, use) {
  const careful = (loaded) => {
    try {
      use(loaded);
    } catch {
      // It stays as it was written.
    }
  };
  if (library.loaded) careful(library.loaded);
  else library.fetch().then(careful, () => {});
}
