// The page around the views: which of them is shown, the theme, the API key, and the dialogs that both use.

import { $, copy, say } from "./dom.js";
import { explain } from "./explain.js";
import { keepsKey, loadKey, loadTheme, saveKey, saveTheme } from "./store.js";
import { Batches } from "./batches/view.js";
import { Dashboard } from "./engine/dashboard.js";
import { Playground } from "./playground.js";

const frame = { askForKey, showText, explain: (id) => explain(id, showText) };
const KEY_WHY = $("key-why").textContent;
// These are not ids of elements, because a browser would scroll to those.
const ROUTES = { "#/": "playground", "#/engine": "dashboard", "#/batches": "batches" };
const TITLES = { playground: "Quire", dashboard: "Engine · Quire", batches: "Batches · Quire" };
const views = { playground: new Playground(frame), dashboard: new Dashboard(frame), batches: new Batches(frame) };

function route() {
  if (location.hash === "#main") return; // the skip link
  const chosen = ROUTES[location.hash] ?? "playground";
  for (const name of Object.keys(views)) {
    const link = $(`to-${name}`);
    $(name).hidden = name !== chosen;
    if (name === chosen) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = TITLES[chosen];
  showVisible();
}

/** Starts the view that is visible and stops the other. */
function showVisible() {
  for (const [name, view] of Object.entries(views)) {
    if (!$(name).hidden && !document.hidden) view.show();
    else view.hide();
  }
}

function applyTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  $("theme").value = theme;
  views.dashboard.recolour();
}

/** Opens the key dialog, with the reason if a request was refused. */
function askForKey(why = "") {
  if ($("key-dialog").open) return;
  // Where there was none yet it is said in the page's words, and not in the API's.
  const refused = loadKey() ? why.replace(/\.$/, "") : "This server asks for a key";
  say($("key-why"), why ? `${refused}. ${KEY_WHY}` : KEY_WHY);
  $("key-why").classList.toggle("refused", Boolean(why));
  $("key").value = loadKey();
  $("key-keep").checked = keepsKey();
  $("key-dialog").showModal();
  $("key").select();
}

function useKey(key) {
  saveKey(key, $("key-keep").checked);
  $("key-dialog").close();
  for (const view of Object.values(views)) view.keyChanged();
  showVisible();
}

/** Shows a text in a dialog, to be read or copied. */
function showText(title, text) {
  say($("text-title"), title);
  $("text-body").value = text;
  say($("text-copied"), "");
  $("text-dialog").showModal();
  $("text-body").setSelectionRange(0, 0);
}

async function copyText() {
  const done = await copy($("text-body").value);
  if (!done) $("text-body").select();
  say($("text-copied"), done ? "Copied" : "Selected: copy with Ctrl+C");
}

$("key-button").addEventListener("click", () => askForKey());
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey($("key").value.trim());
});
$("key-forget").addEventListener("click", () => useKey(""));
$("text-copy").addEventListener("click", copyText);
for (const button of document.querySelectorAll("[data-close]")) {
  button.addEventListener("click", () => button.closest("dialog").close());
}
$("theme").addEventListener("change", () => {
  saveTheme($("theme").value);
  applyTheme($("theme").value);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => views.dashboard.recolour());
addEventListener("hashchange", route);
document.addEventListener("visibilitychange", showVisible);

applyTheme(loadTheme());
route();
