// A conversation: its messages and, where an answer was asked for again or a message changed, the versions of what
// follows. A version is the tail of the conversation from some message on; its first message holds the others.

import { withFiles } from "../draft/files.js";
import { picturesFrom } from "../draft/pictures.js";

const LONGEST_TITLE = 80;

export class Talk {
  constructor({ id = newId(), updated = Date.now(), name = "", system = "", messages = [] } = {}) {
    Object.assign(this, { id, updated, name, system, messages });
    const last = messages.length - 1;
    if (last >= 0 && isEmpty(messages[last])) this.remove(last); // the page was closed before its first token
  }

  /** The name that it was given, or how it begins. */
  get title() {
    if (this.name) return this.name;
    const first = this.messages.find(({ role }) => role === "user");
    const attached = [...(first?.files ?? []), ...(first?.pictures ?? [])];
    const text = first ? first.content || attached[0]?.name || "" : this.system;
    return text.trim().split("\n")[0].slice(0, LONGEST_TITLE) || "Untitled";
  }

  /** Calls it so from now on; nothing: as it begins. */
  rename(name) {
    this.name = name.trim().slice(0, LONGEST_TITLE);
  }

  get blank() {
    return !this.messages.length && !this.system.trim();
  }

  /** Puts another tail in the place of the messages from `at` on, which become a version to go back to. */
  branch(at, tail) {
    const old = this.messages.splice(at);
    if (old.length) place(tail, versionsWith(old), null);
    this.messages.push(...tail);
  }

  /** Shows version `which` of the tail that begins at `at`. */
  show(at, which) {
    const versions = versionsWith(this.messages.splice(at));
    const tail = versions[which];
    place(tail, versions, which);
    this.messages.push(...tail);
  }

  /** Those of an answer's tool calls whose results follow it. */
  results(answer) {
    const told = new Set();
    for (const { role, tool_call_id: id } of this.messages.slice(this.messages.indexOf(answer) + 1)) {
      if (role !== "tool") break;
      const call = answer.tool_calls.find((each) => each.id === id && !told.has(each));
      if (call) told.add(call);
    }
    return told;
  }

  /** Whether nothing but results of its calls follows an answer. */
  endsWithCalls(answer) {
    return this.messages.slice(this.messages.indexOf(answer) + 1).every(({ role }) => role === "tool");
  }

  /** Makes it a conversation of its own, beside the one that was stored under its id. */
  renew() {
    this.id = newId();
  }

  /** Another tab may have stored the same conversation meanwhile: then this one gets an id of its own. */
  keepBoth() {
    if (this.overtaken) this.renew();
    this.overtaken = false;
  }

  /** Takes one message away. Where it was the last, an earlier version of it comes back. */
  remove(at) {
    const [{ versions, version }] = this.messages.splice(at, 1);
    if (!versions) return;
    const next = this.messages[at];
    if (next) {
      if (!next.versions) Object.assign(next, { versions, version });
      return;
    }
    const others = versions.filter((_, index) => index !== version);
    const shown = Math.max(version - 1, 0);
    const tail = others[shown];
    if (others.length > 1) place(tail, others, shown);
    this.messages.push(...tail);
  }

  /** What is stored: tokens with their alternatives are large, so they are shown but not kept. */
  toJSON() {
    const { id, updated, name, system, title } = this;
    return { id, updated, title, ...(name && { name }), system, messages: stored(this.messages) };
  }

  /** The conversation as a Markdown document. */
  toMarkdown() {
    const names = { user: "You", assistant: "Model", tool: "Tool result" };
    const parts = [`# ${this.title}`];
    if (this.system.trim()) parts.push(`## System prompt\n\n${this.system.trim()}`);
    for (const { role, content: text, files, pictures = [], tool_calls } of this.messages) {
      const content = [...pictures.map((each) => `*[picture: ${each.name}]*`), withFiles(text, files)]
        .filter(Boolean).join("\n\n");
      const calls = (tool_calls ?? []).map((call) => `\`\`\`json\n${JSON.stringify(call.function, null, 2)}\n\`\`\``);
      parts.push([`## ${names[role] ?? role}`, content, ...calls].filter(Boolean).join("\n\n"));
    }
    return `${parts.join("\n\n")}\n`;
  }
}

const ID = /^[0-9a-z]{8,20}$/; // as newId makes them
/** What is known of how an answer was made, by type; numbers are at least 0. */
const META = {
  id: "string", finish: "string", stopped: "boolean", tokens: "number", prompt: "number", cached: "number",
  first: "number", seconds: "number", thought: "number",
};

/** A conversation from what a file holds: what is known of it, and nothing else. Throws Error where it is none. */
export function talkFrom(value) {
  const messages = messagesFrom(value?.messages);
  const id = typeof value.id === "string" && ID.test(value.id) ? value.id : newId();
  const updated = Number.isFinite(value.updated) ? value.updated : Date.now();
  const talk = new Talk({ id, updated, system: typeof value.system === "string" ? value.system : "", messages });
  if (typeof value.name === "string") talk.rename(value.name);
  return talk;
}

function messagesFrom(list) {
  if (!Array.isArray(list)) throw new Error("a conversation has a list `messages`");
  return list.map((each) => {
    if (typeof each?.role !== "string" || typeof (each.content ?? "") !== "string")
      throw new Error("each of `messages` has a role and a content, both texts");
    const message = { role: each.role, content: each.content ?? "" };
    for (const name of ["reasoning", "tool_call_id", "name"])
      if (typeof each[name] === "string") message[name] = each[name];
    if (each.meta) message.meta = metaFrom(each.meta);
    if (each.files !== undefined) message.files = filesFrom(each.files);
    if (each.pictures !== undefined) message.pictures = picturesFrom(each.pictures);
    if (each.tool_calls?.length) message.tool_calls = Array.from(each.tool_calls, callFrom);
    if (each.versions !== undefined) Object.assign(message, versionsFrom(each));
    return message;
  });
}

function metaFrom(given) {
  const fits = (value, type) => typeof value === type && (type !== "number" || (value >= 0 && Number.isFinite(value)));
  const known = Object.keys(META).filter((name) => fits(given[name], META[name]));
  return Object.fromEntries(known.map((name) => [name, given[name]]));
}

function filesFrom(files) {
  const fits = Array.isArray(files) && files.length && files.every(({ name, text } = {}) =>
    typeof name === "string" && typeof text === "string");
  if (!fits) throw new Error("`files` is a list; each has a name and a text");
  return files.map(({ name, text }) => ({ name, text }));
}

function callFrom(call) {
  const { name, arguments: given } = call?.function ?? {};
  if (typeof name !== "string" || typeof given !== "string")
    throw new Error("each of `tool_calls` has a function with a name and arguments, both texts");
  return { id: String(call.id ?? ""), type: "function", function: { name, arguments: given } };
}

function versionsFrom({ versions, version }) {
  const fits = Array.isArray(versions) && versions.every((tail, at) => (tail === null) === (at === version));
  if (!fits || !(version in versions)) throw new Error("`versions` is a list with null at `version`");
  const tails = versions.map((tail) => tail && messagesFrom(tail));
  if (tails.some((tail) => tail?.length === 0)) throw new Error("none of `versions` is empty");
  return { versions: tails, version };
}

export const showsPictures = ({ pictures = [] }) => pictures.some(({ url }) => url);

export const isEmpty = ({ role, content, reasoning, tool_calls }) =>
  role === "assistant" && !content && !reasoning && !tool_calls?.length;

/** The versions of a tail that is put away: itself among them, null where none is shown yet. */
function versionsWith(tail) {
  const { versions = [null], version = 0 } = tail[0];
  delete tail[0].versions;
  delete tail[0].version;
  return versions.map((each, index) => (index === version ? tail : each));
}

/** Makes `tail` the version `which` of `versions`, or a new one where that is null. */
function place(tail, versions, which) {
  const version = which ?? versions.length;
  const others = which === null ? [...versions, null] : versions.map((each, index) => (index === which ? null : each));
  Object.assign(tail[0], { versions: others, version });
}

function stored(messages) {
  return messages.map(({ tokens: _, writing: __, versions, ...rest }) =>
    versions ? { ...rest, versions: versions.map((tail) => tail && stored(tail)) } : rest,
  );
}

// crypto.randomUUID is there only on https and localhost.
const newId = () => Date.now().toString(36) + Math.random().toString(36).slice(2, 10);
