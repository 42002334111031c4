// Where the settings stand: beside the conversation, or on a narrow window in a sheet that a button opens.

import { $ } from "../dom.js";

const WIDE = "(min-width: 62rem)";

export function placeSettings() {
  const wide = matchMedia(WIDE);
  const place = () => {
    if (wide.matches) $("settings-dialog").close();
    (wide.matches ? $("settings-beside") : $("settings-sheet")).append($("settings"));
  };
  wide.addEventListener("change", place);
  place();
  $("settings-button").addEventListener("click", () => $("settings-dialog").showModal());
  $("settings-dialog").addEventListener("click", (event) => {
    if (event.target === $("settings-dialog")) $("settings-dialog").close(); // beside the sheet
  });
}
