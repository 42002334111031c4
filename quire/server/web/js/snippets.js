// Shows the playground's request as code, for a terminal or for the OpenAI SDK.

const SDK = new Set([
  "model", "messages", "prompt", "stream", "temperature", "top_p", "max_tokens", "max_completion_tokens", "seed",
  "presence_penalty", "frequency_penalty", "stop", "logprobs", "top_logprobs", "tools", "tool_choice", "n", "echo",
  "parallel_tool_calls", "response_format", "logit_bias", "user", "reasoning_effort", "suffix", "service_tier",
]);

const CHAT_ONLY = new Set([
  "max_completion_tokens", "top_logprobs", "tools", "tool_choice", "parallel_tool_calls", "response_format",
  "reasoning_effort", "service_tier",
]);

/** Characters of one argument of a command; Linux takes 128 KiB. */
const LONGEST_ARGUMENT = 100_000;

/** A request as curl or Python: [title, text]. */
export const code = (kind, path, body, hasKey) =>
  kind === "curl" ? ["As a curl command", curl(path, body, hasKey)] : ["As a Python script", python(body, hasKey)];

/** A curl command. It reads the key from an environment variable, so that the key is not saved with it. */
function curl(path, body, hasKey) {
  const lines = [`curl -N ${location.origin}${path}`, "-H 'Content-Type: application/json'"];
  if (hasKey) lines.push('-H "Authorization: Bearer $OPENAI_API_KEY"');
  const json = JSON.stringify(body, null, 2);
  const long = json.length > LONGEST_ARGUMENT; // pictures: read from its input then
  lines.push(long ? `--data-binary @- <<'END'\n${json}\nEND` : `-d '${json.replaceAll("'", "'\\''")}'`);
  return `${lines.join(" \\\n  ")}\n`;
}

/** A script for the OpenAI SDK. Fields that the SDK does not know go into extra_body. */
function python(body, hasKey) {
  const { stream_options: _, ...rest } = body;
  const chat = "messages" in rest;
  const isKnown = (name) => SDK.has(name) && (chat || !CHAT_ONLY.has(name));
  const known = Object.entries(rest).filter(([name]) => isKnown(name));
  const extra = Object.fromEntries(Object.entries(rest).filter(([name]) => !isKnown(name)));
  const args = known.map(([name, value]) => `    ${name}=${literal(value, 4)},`);
  if (Object.keys(extra).length) args.push(`    extra_body=${literal(extra, 4)},`);
  const key = hasKey ? 'os.environ["OPENAI_API_KEY"]' : '"none"';
  return [
    ...(hasKey ? ["import os", ""] : []),
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url="${location.origin}/v1", api_key=${key})`,
    `stream = client.${chat ? "chat.completions" : "completions"}.create(`,
    ...args,
    ")",
    "for chunk in stream:",
    "    if chunk.choices:",
    `        print(chunk.choices[0].${chat ? 'delta.content or ""' : "text"}, end="", flush=True)`,
    "",
  ].join("\n");
}

/** A JSON value as a Python literal. */
export function literal(value, indent = 0) {
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const items = Array.isArray(value)
    ? value.map((each) => literal(each, indent + 4))
    : Object.entries(value).map(([name, each]) => `${JSON.stringify(name)}: ${literal(each, indent + 4)}`);
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  const flat = `${open}${items.join(", ")}${close}`;
  if (flat.length + indent < 100 && !flat.includes("\n")) return flat;
  const pad = " ".repeat(indent + 4);
  return `${open}\n${items.map((item) => `${pad}${item},`).join("\n")}\n${" ".repeat(indent)}${close}`;
}
