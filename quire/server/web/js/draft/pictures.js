// Pictures that go with a message. A large one is made smaller first: a model reads no more of it, and the browser
// keeps conversations in some 5 MB.

import { el } from "../dom.js";
import { size } from "../figures.js";

export const MOST_PICTURES = 4;
/** Bytes that a picture may have as it is kept and sent. */
const MOST_BYTES = 192 * 1024;
const MOST_READ = 50 * 2 ** 20;
/** Pixels of the longer side: what SmolVLM and others like it read at most. */
const LONGEST = 1536;
const SMALLER = 0.75;
const QUALITIES = [0.9, 0.8, 0.65];
const AS_IT_IS = ["image/png", "image/jpeg", "image/webp"];
const DATA_URL = /^data:image\/(png|jpeg|webp);base64,[A-Za-z0-9+/]+=*$/;

/** Whether a file is a picture, which is drawn; an SVG is text. */
export const isPicture = ({ type }) => type.startsWith("image/") && type !== "image/svg+xml";

/** A picture as it is kept and sent: {name, url}, url a data: URL. Throws Error that says what is wrong with it. */
export async function readPicture(file) {
  if (file.size > MOST_READ) throw new Error(`has ${size(file.size)}; a picture may have ${size(MOST_READ)}.`);
  let bitmap;
  try {
    bitmap = await createImageBitmap(file);
  } catch (error) {
    throw new Error("is no picture that this browser can read.", { cause: error });
  }
  const name = file.name || "pasted picture";
  const longer = Math.max(bitmap.width, bitmap.height);
  const small = longer <= LONGEST && file.size <= MOST_BYTES && AS_IT_IS.includes(file.type);
  const blob = small ? file : await reduced(bitmap, Math.min(1, LONGEST / longer));
  bitmap.close();
  return { name, url: await dataUrl(blob) };
}

/** The picture in as good a quality as fits, smaller where none does. */
async function reduced(bitmap, scale) {
  for (let share = scale; ; share *= SMALLER) {
    const canvas = drawn(bitmap, share);
    for (const quality of QUALITIES) {
      const blob = await encoded(canvas, quality);
      if (blob.size <= MOST_BYTES) return blob;
    }
  }
}

function drawn(bitmap, scale) {
  const side = (length) => Math.max(1, Math.round(length * scale));
  const canvas = el("canvas", { width: side(bitmap.width), height: side(bitmap.height) });
  const context = canvas.getContext("2d");
  context.fillStyle = "#ffffff"; // what is transparent, as the server has it
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return canvas;
}

/** In WEBP, or in JPEG where the browser writes no WEBP. */
async function encoded(canvas, quality) {
  const write = (type) => new Promise((done) => {
    canvas.toBlob(done, type, quality);
  });
  const blob = await write("image/webp");
  return blob?.type === "image/webp" ? blob : write("image/jpeg");
}

function dataUrl(blob) {
  return new Promise((done, failed) => {
    const reader = new FileReader();
    reader.onload = () => done(reader.result);
    reader.onerror = () => failed(new Error("cannot be read."));
    reader.readAsDataURL(blob);
  });
}

/** Pictures from what a file holds. Throws Error where they are none. */
export function picturesFrom(given) {
  const fits = Array.isArray(given) && given.length && given.every(({ name, url } = {}) =>
    typeof name === "string" && (url === undefined || (typeof url === "string" && DATA_URL.test(url))));
  if (!fits) throw new Error("`pictures` is a list; each has a name and, as a data: URL, a PNG, JPEG or WEBP");
  return given.map(({ name, url }) => ({ name, ...(url && { url }) }));
}

/** A message's parts in the API's form; pictures come first, as models are trained. */
export function partsWith(text, pictures) {
  const shown = pictures.filter(({ url }) => url).map(({ url }) => ({ type: "image_url", image_url: { url } }));
  return shown.length ? [...shown, ...(text ? [{ type: "text", text }] : [])] : text;
}

/** The pictures of a message on the page. */
export function pictureRow(pictures = []) {
  if (!pictures.length) return [];
  return [el("ul", { class: "pictures", role: "list" }, pictures.map(({ name, url }) => el("li", {},
    url ? el("img", { src: url, alt: name, title: name })
      : el("span", { class: "note" }, `${name}: the picture itself is not kept any more`))))];
}
