// Helpers that create elements. Text is always inserted as text; no code of this page parses HTML.

/** Creates an element with properties, and with nodes or texts as children. */
export function el(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "class") element.className = value;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name in element && !name.includes("-")) element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

/** Creates an SVG element. */
export function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

export const $ = (id) => document.getElementById(id);

/** Sets an element's text if it differs, so that screen readers announce only changes. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Returns a function that calls `callback` at most once per frame. */
export function perFrame(work) {
  let asked = false;
  return () => {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => {
      asked = false;
      work();
    });
  };
}

export function sleep(milliseconds) {
  return new Promise((resolve) => {
    setTimeout(resolve, milliseconds);
  });
}

/** Copies a text; false where the browser allows it to nobody (clipboards are for https and localhost). */
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const field = el("textarea", { value: text, readOnly: true, class: "unseen" });
    (document.querySelector("dialog[open]") ?? document.body).append(field);
    const before = document.activeElement;
    field.select();
    const done = document.execCommand("copy");
    field.remove();
    before?.focus();
    return done;
  }
}

/** A button that copies what `text` returns, and says that it did. */
export function copyButton(text, properties = {}) {
  const button = el("button", { type: "button", "data-action": "copy", ...properties }, "Copy");
  button.addEventListener("click", async () => {
    say(button, (await copy(text())) ? "Copied" : "Not allowed here");
    setTimeout(() => say(button, "Copy"), 1500);
  });
  return button;
}

/** Lets the user save a text or a Blob as a file. */
export function download(name, content, type) {
  const address = URL.createObjectURL(new Blob([content], { type }));
  el("a", { href: address, download: name }).click();
  URL.revokeObjectURL(address);
}
