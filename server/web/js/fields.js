// The settings beside the playground. A blank field is not sent: the server's default holds.

import { $, el } from "./dom.js";

const NUMBERS = [
  ["temperature", "Temperature", { min: 0, max: 2, step: 0.1 }],
  ["max_tokens", "Max tokens", { min: 1, step: 1 }],
  ["top_p", "Top p", { min: 0, max: 1, step: 0.05 }],
  ["top_k", "Top k", { min: 0, step: 1 }],
  ["min_p", "Min p", { min: 0, max: 1, step: 0.01 }],
  ["seed", "Seed", { step: 1 }],
  ["presence_penalty", "Presence penalty", { min: -2, max: 2, step: 0.1 }],
  ["frequency_penalty", "Frequency penalty", { min: -2, max: 2, step: 0.1 }],
  ["repetition_penalty", "Repetition penalty", { min: 0, step: 0.05 }],
];

export const DEFAULTS = {
  model: "",
  max_tokens: "256",
  stop: "",
  logprobs: false,
  top_logprobs: "5",
  markdown: true,
  tools: "",
  extra: "",
};

/** Builds the fields into #fields; `changed` is called after each change to `settings`. */
export function buildFields(settings, changed) {
  const keep = (name, value) => {
    settings[name] = value;
    changed(name);
  };
  const text = (name, label, hint, rows) =>
    labelled(
      label,
      name,
      el("textarea", {
        id: name,
        rows,
        value: settings[name] ?? "",
        placeholder: hint,
        spellcheck: false,
        oninput: (event) => keep(name, event.target.value),
      }),
    );
  const check = (name, label) =>
    el("label", { class: "check" }, el("input", { id: name, type: "checkbox", checked: settings[name],
      onchange: (event) => keep(name, event.target.checked) }), label);
  const number = ([name, label, range]) =>
    labelled(
      label,
      name,
      el("input", {
        id: name,
        type: "number",
        inputMode: "decimal",
        placeholder: "default",
        ...range,
        value: settings[name] ?? "",
        oninput: (event) => keep(name, event.target.value),
      }),
    );
  $("fields").append(
    labelled("Model", "model", el("select", { id: "model", onchange: (event) => keep("model", event.target.value) })),
    el("div", { class: "pairs" }, NUMBERS.map(number)),
    text("stop", "Stop strings, one a line", "", 1),
    el("div", { class: "group" },
      check("logprobs", "Colour tokens by probability"),
      number(["top_logprobs", "Alternatives shown", { min: 0, max: 20, step: 1 }]),
      check("markdown", "Render Markdown"),
    ),
    el("details", { open: Boolean(settings.tools || settings.extra) }, el("summary", {}, "Tools and other fields"),
      text("tools", "Tools, a JSON list", '[{"type": "function", "function": {"name": …}}]', 4),
      text("extra", "More of the request, a JSON object", '{"response_format": {"type": "json_object"}}', 3),
    ),
  );
}

function labelled(label, name, control) {
  return el("div", { class: "field" }, el("label", { htmlFor: name }, label), control);
}

export function fillModels(names, settings) {
  if (!names.includes(settings.model)) settings.model = names[0] ?? "";
  $("model").replaceChildren(
    ...names.map((name) => el("option", { value: name, selected: name === settings.model }, name)),
  );
}

/** The request's fields that do not depend on the endpoint, and what asks for token probabilities. Throws Error. */
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
  const tools = json(settings.tools, "Tools");
  if (tools !== undefined && chat) body.tools = tools;
  const extra = json(settings.extra, "More of the request");
  if (extra !== undefined && (extra === null || typeof extra !== "object" || Array.isArray(extra))) {
    throw new Error("More of the request: must be a JSON object.");
  }
  return { ...body, ...extra };
}

function json(text, label) {
  if (!text.trim()) return undefined;
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${label}: ${error.message}`);
  }
}
