// The text of PDF files, by pdf.js, which is fetched with the first of them.

import { bytesOf } from "./files.js";
import { size } from "../figures.js";

const LIBRARY = "../../vendor/pdf.min.mjs";
const WORKER = new URL("../../vendor/pdf.worker.min.mjs", import.meta.url);
/** Bytes of a file: more are not read. */
const MOST_BYTES = 32 * 2 ** 20;

export const isPdf = (file) => file.type === "application/pdf" || /\.pdf$/i.test(file.name);

let asked = null;

/** pdf.js, and the thread in which it reads. */
function library() {
  asked ??= import(LIBRARY).then((pdf) => {
    // The page's policy wants to be told that an address is meant to be run.
    const policy = globalThis.trustedTypes?.createPolicy("quire-pdf", { createScriptURL: (address) => address });
    const address = policy ? policy.createScriptURL(WORKER.href) : WORKER.href;
    pdf.GlobalWorkerOptions.workerPort = new Worker(address, { type: "module" });
    return pdf;
  });
  return asked;
}

/** A PDF file's text, page after page, of at most so many bytes. Throws Error that says what is wrong with it. */
export async function readPdf(file, mostBytes) {
  if (file.size > MOST_BYTES) throw new Error(`has ${size(file.size)}; a PDF file may have ${size(MOST_BYTES)}.`);
  const pdf = await library();
  const task = pdf.getDocument({ data: new Uint8Array(await file.arrayBuffer()), isEvalSupported: false });
  try {
    const pages = await textOfPages(await task.promise, mostBytes);
    const text = pages.map((page) => page.trim()).filter(Boolean).join("\n\n");
    if (!text) throw new Error("has no text in it: its pages are pictures.");
    return { name: file.name, text };
  } catch (error) {
    if (error.name === "PasswordException") throw new Error("is locked by a password.", { cause: error });
    if (error.name === "InvalidPDFException") throw new Error("is no PDF file that can be read.", { cause: error });
    throw error;
  } finally {
    await task.destroy();
  }
}

async function textOfPages(pdf, mostBytes) {
  const pages = [];
  let left = mostBytes;
  for (let number = 1; number <= pdf.numPages; number += 1) {
    const { items } = await (await pdf.getPage(number)).getTextContent();
    const page = items.map(({ str, hasEOL }) => str + (hasEOL ? "\n" : "")).join("");
    left -= bytesOf(page);
    if (left < 0) {
      const until = `the files of a message may have ${size(mostBytes)} of text, which ends in page ${number}`;
      throw new Error(`is too long: ${until} of ${pdf.numPages}.`);
    }
    pages.push(page);
  }
  return pages;
}
