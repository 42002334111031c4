// What the browser stores between visits. The API key is kept after the tab is closed only if the user asks for it.

const STATE = "quire.playground";
const THEME = "quire.theme";
const KEY = "quire.key";

function read(storage, name) {
  try {
    return storage.getItem(name);
  } catch {
    return null; // storage may be forbidden; the page works without it
  }
}

function write(storage, name, value) {
  try {
    if (value === null) storage.removeItem(name);
    else storage.setItem(name, value);
  } catch {
    // storage is forbidden or full: nothing is stored
  }
}

export function loadState(defaults) {
  try {
    return { ...defaults, ...JSON.parse(read(localStorage, STATE) ?? "{}") };
  } catch {
    return { ...defaults };
  }
}

export const saveState = (state) => write(localStorage, STATE, JSON.stringify(state));

export const loadTheme = () => read(localStorage, THEME) ?? "auto";
export const saveTheme = (theme) => write(localStorage, THEME, theme);

export const loadKey = () => read(sessionStorage, KEY) ?? read(localStorage, KEY) ?? "";
export const keepsKey = () => read(localStorage, KEY) !== null;

export function saveKey(key, keep) {
  write(sessionStorage, KEY, key || null);
  write(localStorage, KEY, keep && key ? key : null);
}
