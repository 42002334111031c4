// What stands beside the conversation on a wide window, and on a narrow one in a dialog that a button opens.

import { $ } from "./dom.js";

const WIDE = "(min-width: 62rem) and (min-height: 44rem)"; // as css/playground.css has it

/** Keeps `part` in the element `beside` while a window is as wide as `query` says, and else in `dialog`, at its
    beginning or in `place` there. Returns the query; `placed()` is called after each change of it. */
export function fromWide(query, part, beside, dialog, placed = () => {}, place = dialog) {
  const wide = matchMedia(query);
  const put = () => {
    if (wide.matches) dialog.close();
    (wide.matches ? beside : place).prepend(part);
  };
  wide.addEventListener("change", () => {
    put();
    placed();
  });
  put();
  return wide;
}

export function placeSettings() {
  fromWide(WIDE, $("settings"), $("settings-beside"), $("settings-dialog"), undefined, $("settings-sheet"));
  $("settings-button").addEventListener("click", () => $("settings-dialog").showModal());
  $("settings-dialog").addEventListener("click", (event) => {
    if (event.target === $("settings-dialog")) $("settings-dialog").close(); // beside the sheet
  });
}
