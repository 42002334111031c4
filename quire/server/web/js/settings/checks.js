// Checks what is typed as JSON, with every key: each check gives {value, says}, or {error}. What a schema means to the
// model the server checks when it is asked.

const TYPES = ["object", "array", "string", "number", "integer", "boolean", "null"];
const SHOWN_NAMES = 6;
const DEEPEST = 64;

export const EXAMPLE_SCHEMA = `{
  "type": "object",
  "properties": {
    "name": {"type": "string", "maxLength": 40},
    "age": {"type": "integer", "minimum": 0, "maximum": 120},
    "friends": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 3}
  },
  "required": ["name", "age", "friends"],
  "additionalProperties": false
}`;
export const EXAMPLE_TOOLS = `[
  {
    "type": "function",
    "function": {
      "name": "weather",
      "description": "The weather in a city at this moment",
      "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"]
      }
    }
  }
]`;

const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);

/** The text of a JSON schema. */
export const checkSchema = (text) =>
  read(text, (schema) => {
    const wrong = schemaError(schema, "the schema");
    return wrong ? { error: wrong } : { says: `Fits: ${described(schema)}.` };
  });

/** The text of a list of tools, as /v1/chat/completions takes it. */
export const checkTools = (text) =>
  read(text, (tools) => {
    if (!Array.isArray(tools)) return { error: "must be a list: [ … ]" };
    const wrong = tools.map(toolError).find(Boolean);
    if (wrong) return { error: wrong };
    return { says: `The model may call ${listed(tools.map((each) => each.function.name))}.` };
  });

/** The text of a JSON object. */
export const checkExtra = (text) =>
  read(text, (value) => {
    if (!isObject(value)) return { error: "must be a JSON object: { … }" };
    const choice = value.tool_choice === undefined ? "" : " After a tool's result a forced tool_choice is auto.";
    return { says: `Sends ${listed(Object.keys(value))} too.${choice}` };
  });

function read(text, check) {
  if (!text.trim()) return { says: "" };
  try {
    const value = JSON.parse(text);
    return { value, ...check(value) };
  } catch (error) {
    return { error: error.message };
  }
}

function toolError(tool, index) {
  const where = `tool ${index + 1}`;
  if (!isObject(tool) || tool.type !== "function") return `${where} needs "type": "function"`;
  const { name, parameters } = tool.function ?? {};
  if (typeof name !== "string" || !name) return `${where} needs "function": {"name": "…"}`;
  return parameters === undefined ? null : schemaError(parameters, `${name}'s parameters`);
}

/** What is certainly wrong with a schema, in words; null where nothing is found. */
function schemaError(schema, where, depth = 0) {
  if (typeof schema === "boolean") return null;
  if (!isObject(schema)) return `${where} must be an object: { … }`;
  if (depth > DEEPEST) return null;
  const { type, properties, required, items } = schema;
  const unknown = [type ?? []].flat().find((each) => !TYPES.includes(each));
  if (unknown !== undefined)
    return `${where}: there is no type ${JSON.stringify(unknown)}; there are ${TYPES.join(", ")}`;
  if (schema.enum !== undefined && !Array.isArray(schema.enum)) return `${where}: enum must be a list`;
  if (required !== undefined && !(Array.isArray(required) && required.every((each) => typeof each === "string")))
    return `${where}: required must be a list of names`;
  if (properties !== undefined && !isObject(properties)) return `${where}: properties must be an object: { … }`;
  const inner = Object.entries(properties ?? {}).map(([name, each]) => [each, `${where}, ${name}`]);
  if (items !== undefined) inner.push([items, `${where}, items`]);
  return inner.map(([each, place]) => schemaError(each, place, depth + 1)).find(Boolean) ?? null;
}

function described({ type, properties, items }) {
  if (properties) return `an object with ${listed(Object.keys(properties))}`;
  if (items) return "a list";
  return type ? [type].flat().join(" or ") : "what the schema says";
}

function listed(names) {
  const shown = names.slice(0, SHOWN_NAMES).join(", ");
  return names.length > SHOWN_NAMES ? `${shown} and ${names.length - SHOWN_NAMES} more` : shown || "nothing";
}
