// Text files that go with a message: their text goes into it in fences.

/** A message's text as the model gets it: each file in a fence with its name, then what was typed. */
export function withFiles(text, files = []) {
  return [...files.map(fenced), text].filter(Boolean).join("\n\n");
}

function fenced({ name, text }) {
  const longest = Math.max(2, ...(text.match(/`+/g) ?? []).map((run) => run.length));
  const fence = "`".repeat(longest + 1);
  return `${fence}${name.replace(/[`\r\n]/g, " ")}\n${text.replace(/\n$/, "")}\n${fence}`;
}

export const bytesOf = (text) => new TextEncoder().encode(text).length;

/** A file's text. Throws Error that says what is wrong with it. */
export async function readText(file) {
  let text;
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
  } catch (error) {
    throw new Error(error instanceof TypeError ? NO_TEXT : "cannot be read.", { cause: error });
  }
  if (text.includes("\0")) throw new Error(NO_TEXT);
  if (!text.trim()) throw new Error("is empty.");
  return { name: file.name || "pasted.txt", text: text.replaceAll("\r\n", "\n") };
}

const NO_TEXT = "is neither text in UTF-8 nor a PDF or a picture; only such files can be attached.";
