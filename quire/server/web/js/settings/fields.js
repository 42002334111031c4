// The settings beside the playground. A blank field is not sent, so the server's default applies.

import { $, el, say } from "../dom.js";
import { checkExtra, checkSchema, checkTools, EXAMPLE_SCHEMA, EXAMPLE_TOOLS } from "./checks.js";
import { NUMBERS } from "./sampling_fields.js";

/** What a blank field stands for where no model decides. */
const BLANK = { max_tokens: "no limit", seed: "random", presence_penalty: "0", frequency_penalty: "0" };
const COMMON = [
  "temperature", "max_tokens", "top_p", "top_k", "min_p", "seed", "repetition_penalty", "presence_penalty",
  "frequency_penalty",
];
const isCommon = ([name]) => COMMON.includes(name);
const JSON_FIELDS = [
  { name: "schema", label: "Its JSON schema; blank: any object", rows: 5, check: checkSchema, example: EXAMPLE_SCHEMA },
  { name: "tools", label: "Tools, a JSON list", rows: 5, check: checkTools, example: EXAMPLE_TOOLS },
  { name: "extra", label: "More of the request, a JSON object", rows: 3, check: checkExtra,
    example: '{\n  "min_tokens": 1\n}' }, // which any request may have
];
const CHECK_BOXES = ["logprobs", "markdown", "json"];

export const DEFAULTS = {
  model: "",
  ...Object.fromEntries(NUMBERS.map(([name]) => [name, ""])),
  stop: "",
  logprobs: false,
  top_logprobs: "5",
  markdown: true,
  json: false,
  schema: "",
  tools: "",
  extra: "",
};

/** Settings from what the browser has stored: what is known of it, and else the defaults. */
export function settingsFrom(stored) {
  const pairs = Object.entries(DEFAULTS);
  return Object.fromEntries(pairs.map(([name, plain]) => {
    const value = stored?.[name];
    return [name, typeof value === typeof plain ? value : plain];
  }));
}

/** Fills #fields; `changed(name)` is called after each change to `settings`. */
export function buildFields(settings, changed) {
  const keep = (name, value) => {
    settings[name] = value;
    changed(name);
  };
  const [schema, tools, extra] = JSON_FIELDS.map((field) => jsonField(field, keep));
  const number = numberField(keep);
  const check = (name, label) =>
    el("label", { class: "check" },
      el("input", { id: name, type: "checkbox", onchange: (event) => keep(name, event.target.checked) }), label);
  $("fields").append(
    labelled("Model", "model", el("select", { id: "model", onchange: (event) => keep("model", event.target.value) })),
    el("div", { class: "pairs" }, NUMBERS.filter(isCommon).map(number)),
    el("details", { id: "rare-fold" }, el("summary", {}, "More sampling fields"),
      el("div", { class: "pairs" }, NUMBERS.filter((field) => !isCommon(field)).map(number))),
    labelled("Stop strings, one a line", "stop", area("stop", 1, keep)),
    el("div", { class: "group" },
      check("logprobs", "Colour tokens by probability"),
      number(["top_logprobs", "Alternatives shown", { min: 0, max: 20, step: 1 }]),
      check("markdown", "Render Markdown"),
      check("json", "Answer with a JSON object"),
      schema),
    el("details", { id: "tools-fold" }, el("summary", {}, "Tools and other fields"), tools, extra),
  );
  showSettings(settings);
  $("tools-fold").open = Boolean(settings.tools || settings.extra);
}

/** Makes the fields show `settings`, wherever these come from. */
export function showSettings(settings) {
  for (const name of Object.keys(DEFAULTS)) {
    const field = $(name);
    if (CHECK_BOXES.includes(name)) field.checked = settings[name];
    else field.value = settings[name] ?? "";
  }
  for (const { name, check } of JSON_FIELDS) showCheck(name, check, settings[name]);
  if (settings.tools || settings.extra) $("tools-fold").open = true;
  if (NUMBERS.some((field) => !isCommon(field) && settings[field[0]])) $("rare-fold").open = true;
  showSchemaField(settings);
}

/** The schema's field is there while answers are to be JSON. */
export function showSchemaField(settings) {
  $("schema").closest(".field").hidden = !settings.json;
}

const area = (name, rows, keep, more = {}) =>
  el("textarea", { id: name, rows, spellcheck: false, oninput: (event) => keep(name, event.target.value), ...more });

const numberField = (keep) => ([name, label, range]) =>
  labelled(label, name, el("input", {
    id: name,
    type: "number",
    inputMode: "decimal",
    placeholder: BLANK[name] ?? "default",
    ...range,
    oninput: (event) => keep(name, event.target.value),
  }));

/** A field for JSON that is checked with every key; while it is blank, an example can be put there. */
function jsonField({ name, label, rows, check, example }, keep) {
  const show = (text) => showCheck(name, check, text);
  const field = area(name, rows, (_, text) => {
    keep(name, text);
    show(text);
  }, { "aria-describedby": `${name}-said` });
  const insert = () => {
    field.value = example;
    keep(name, example);
    show(example);
    field.focus();
  };
  const button = { type: "button", class: "quiet small", id: `${name}-example`, onclick: insert };
  return el("div", { class: "field" }, el("label", { htmlFor: name }, label), field,
    el("p", { id: `${name}-said`, class: "checked", role: "status" }), el("button", button, "Put an example here"));
}

function showCheck(name, check, text) {
  const { error, says } = check(text);
  $(name).setAttribute("aria-invalid", String(Boolean(error)));
  $(`${name}-said`).classList.toggle("refused", Boolean(error));
  say($(`${name}-said`), error ?? says);
  $(`${name}-example`).hidden = Boolean(text.trim());
}

function labelled(label, name, control) {
  return el("div", { class: "field" }, el("label", { htmlFor: name }, label), control);
}

/** A blank field shows what the model samples with: `defaults` by name, from its generation_config.json. */
export function showDefaults(defaults) {
  for (const [name] of NUMBERS) $(name).placeholder = BLANK[name] ?? String(defaults[name] ?? "default");
}

/** The fields that both endpoints have, and those that ask for token probabilities. Throws Error. */
export function parameters(settings, chat) {
  const body = { model: settings.model };
  for (const [name, label] of NUMBERS) {
    if ((settings[name] ?? "") === "") continue;
    if (!Number.isFinite(Number(settings[name]))) throw new Error(`${label} is not a number.`);
    body[name] = Number(settings[name]);
  }
  const stop = settings.stop.split("\n").filter(Boolean);
  if (stop.length) body.stop = stop;
  if (settings.logprobs) {
    const top = Number(settings.top_logprobs || 0);
    Object.assign(body, chat ? { logprobs: true, top_logprobs: top } : { logprobs: top });
  }
  const tools = valid(checkTools, settings.tools, "Tools");
  if (tools !== undefined && chat) body.tools = tools;
  if (settings.json) body.response_format = responseFormat(valid(checkSchema, settings.schema, "JSON schema"));
  return { ...body, ...valid(checkExtra, settings.extra, "More of the request") };
}

const responseFormat = (schema) =>
  schema === undefined ? { type: "json_object" } : { type: "json_schema", json_schema: { name: "answer", schema } };

function valid(check, text, label) {
  const { error, value } = check(text);
  if (error) throw new Error(`${label}: ${error}`);
  return value;
}
