// The body of the request that the page would send.

import { withFiles } from "./draft/files.js";
import { partsWith } from "./draft/pictures.js";
import { parameters } from "./settings/fields.js";

export const PATHS = { chat: "/v1/chat/completions", completion: "/v1/completions" };

/** The body of a request for an answer to `messages` of the conversation. Throws Error when a setting is not valid. */
export function chatBody(settings, talk, messages) {
  const { model, ...rest } = parameters(settings, true);
  const system = talk.system.trim() ? [{ role: "system", content: talk.system }] : [];
  const choice = messages.at(-1)?.role === "tool" && forces(rest.tool_choice) ? { tool_choice: "auto" } : {};
  return { model, messages: [...system, ...messages.map(wire)], ...rest, ...choice, ...STREAMED };
}

/** Whether a tool must be called: asked so again after a tool's result, the model would call for ever. */
const forces = (choice) => choice !== undefined && choice !== "auto" && choice !== "none";

/** The body of a request to go on with a text. Throws Error when a setting is not valid. */
export function completionBody(settings, prompt) {
  const { model, ...rest } = parameters(settings, false);
  return { model, prompt, ...rest, ...STREAMED };
}

const STREAMED = { stream: true, stream_options: { include_usage: true } };

/** A message in the API's form. */
function wire({ role, content, files, pictures, tool_calls, tool_call_id }) {
  const text = withFiles(content, files);
  return {
    role,
    content: pictures ? partsWith(text, pictures) : text,
    ...(tool_calls && { tool_calls }),
    ...(tool_call_id && { tool_call_id }),
  };
}
