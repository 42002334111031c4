// Streams one answer and builds up a message from its chunks.

import { call, events } from "./api.js";
import { shownTalk } from "./store.js";
import { tokensOf } from "./message/tokens.js";

/**
 * Sends a request and adds what it streams to `message`: content, reasoning, tool_calls, tokens, meta. Calls `grown`
 * after each chunk. Returns without an error when `signal` aborts it. Throws ApiError.
 */
export async function ask(path, body, message, signal, grown) {
  const open = () => call(path, { method: "POST", body, signal });
  sessionStorage.removeItem(LEFT);
  await receive(open, message, grown, body.continue_final_message ? () => {} : remember);
  if (!leaving) sessionStorage.removeItem(LEFT);
}

/** The same for an answer whose stream was left when the page was reloaded: all of it comes again, and what follows. */
export async function takeUp(stream, message, signal, grown) {
  await receive(() => call(`/v1/streams/${stream}`, { signal }), message, grown, () => {});
  if (!leaving) sessionStorage.removeItem(LEFT);
}

/** The stream that this tab read when it was reloaded, in a conversation whose last message it answers; null: none. */
export function leftStream(talk) {
  const left = JSON.parse(sessionStorage.getItem(LEFT) ?? "null");
  if (left?.talk !== talk.id) return null;
  const last = talk.messages.at(-1);
  if (last?.role === "assistant" && !last.meta?.finish) talk.remove(talk.messages.length - 1); // it comes again, whole
  return ["user", "tool"].includes(talk.messages.at(-1)?.role) ? left.stream : null;
}

const LEFT = "quire.stream";
let leaving = false;
addEventListener("pagehide", () => {
  leaving = true;
});
addEventListener("pageshow", () => {
  leaving = false;
});

function remember(response) {
  const stream = response.headers.get("X-Stream-Id"); // where the server keeps streams
  if (stream) sessionStorage.setItem(LEFT, JSON.stringify({ talk: shownTalk(), stream }));
}

async function receive(open, message, grown, began) {
  const start = performance.now();
  const seconds = () => (performance.now() - start) / 1000;
  message.meta = {};
  try {
    const response = await open();
    began(response);
    for await (const { data } of events(response)) {
      if (data === "[DONE]") break;
      if (data.error) throw new Error(data.error.message);
      take(data, message, seconds);
      grown();
    }
  } catch (error) {
    if (error.name !== "AbortError") throw error;
    message.meta.stopped = true;
  }
}

function take(chunk, message, seconds) {
  const { meta } = message;
  meta.id = chunk.id;
  if (chunk.usage) {
    meta.tokens = chunk.usage.completion_tokens;
    meta.prompt = chunk.usage.prompt_tokens;
    meta.cached = chunk.usage.prompt_tokens_details?.cached_tokens ?? 0;
  }
  const choice = chunk.choices?.find(({ index }) => index === 0);
  if (!choice) return;
  const delta = choice.delta ?? { content: choice.text };
  const said = delta.content || delta.reasoning_content || delta.tool_calls || choice.logprobs;
  if (said) meta.first ??= seconds();
  if (said) meta.seconds = seconds();
  if (message.reasoning && !message.content && (delta.content || delta.tool_calls)) meta.thought ??= seconds();
  message.content += delta.content ?? "";
  if (delta.reasoning_content) message.reasoning = (message.reasoning ?? "") + delta.reasoning_content;
  for (const part of delta.tool_calls ?? []) addCall(message, part);
  if (choice.logprobs) (message.tokens ??= []).push(...tokensOf(choice.logprobs));
  if (choice.finish_reason) meta.finish = choice.finish_reason;
}

function addCall(message, delta) {
  const calls = (message.tool_calls ??= []);
  const added = (calls[delta.index] ??= { id: delta.id, type: "function", function: { name: "", arguments: "" } });
  added.function.name += delta.function?.name ?? "";
  added.function.arguments += delta.function?.arguments ?? "";
}
