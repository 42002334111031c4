// Sends requests to this server, with the API key if there is one, and reads server-sent events. Events are read with
// fetch, because EventSource cannot send headers.

import { loadKey } from "./store.js";

/** What stands before all paths where a proxy serves this server below a prefix; "" elsewhere. */
const ROOT = new URL("../..", import.meta.url).pathname.replace(/\/$/, "");

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }

  get needsKey() {
    return this.status === 401 || this.status === 403;
  }

  /** Whether the request itself is what the server will not have: sent again it would be refused again. */
  get refused() {
    return this.status >= 400 && this.status < 500 && this.status !== 429 && !this.needsKey;
  }
}

/** The response of a request that succeeded. Throws ApiError with the server's message. */
export async function call(path, { method = "GET", body, signal } = {}) {
  const headers = {};
  const key = loadKey();
  if (key) headers.Authorization = `Bearer ${key}`;
  const given = body === undefined || body instanceof FormData; // as it is: the browser tells a form's type
  if (!given) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(ROOT + path, {
      method,
      headers,
      signal,
      body: given ? body : JSON.stringify(body),
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The server cannot be reached.");
  }
  if (response.ok) return response;
  throw new ApiError(response.status, await errorMessage(response));
}

async function errorMessage(response) {
  const text = await response.text().catch(() => "");
  try {
    return JSON.parse(text).error.message;
  } catch {
    return `The server answered with status ${response.status}.`;
  }
}

/** The events of a response's body, as {event, data}; data is JSON or the text [DONE]. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      rest += value;
      const blocks = rest.split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) if (!block.startsWith(":")) yield parse(block); // no comments
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function parse(block) {
  let event = "message";
  let data = "";
  for (const line of block.split("\n")) {
    if (line.startsWith("event: ")) event = line.slice(7);
    else if (line.startsWith("data: ")) data += line.slice(6);
  }
  return { event, data: data === "[DONE]" ? data : JSON.parse(data) };
}
