// Conversations and presets as one file, and from such a file.

import { addPresets, presetsFrom } from "../settings/presets.js";
import { forgetTalk, loadPresets, storedTalks, storeTalk } from "../store.js";
import { talkFrom } from "./talk.js";

/** All of them, as the text of a file. */
export const exported = () => JSON.stringify({ conversations: storedTalks(), presets: loadPresets() }, null, 1);

/** Keeps what a file holds beside what there is: what is to be said of it, and how many presets it had. */
export function addAll(name, text) {
  let read;
  try {
    read = contents(JSON.parse(text));
  } catch (error) {
    const why = error instanceof SyntaxError ? "it is no JSON" : error.message;
    return { says: `${name} is not a Quire export: ${why}.`, presets: 0 };
  }
  const { talks, presets } = read;
  const count = Object.keys(presets).length;
  try {
    const added = addTalks(talks);
    addPresets(presets);
    const there = talks.length - added;
    const says = `Read: ${counted(added, "conversation")}${count ? ` and ${counted(count, "preset")}` : ""}.`;
    const known = there === 1 ? " One was already there." : ` ${there} were already there.`;
    return { says: there ? says + known : says, presets: count };
  } catch (error) {
    return { says: `Not all of ${name} could be kept: ${error.message}.`, presets: count };
  }
}

/** Stores those that are not there yet; returns how many. Throws Error. */
function addTalks(talks) {
  const stored = storedTalks();
  let added = 0;
  for (const talk of talks) {
    const { title } = talk;
    // One that had to get a new id is known by its title.
    if (stored.some((each) => each.updated === talk.updated && (each.id === talk.id || each.title === title))) continue;
    while (stored.some(({ id }) => id === talk.id)) talk.renew(); // another one, or a later state of this one
    if (storeTalk(talk) !== "all") {
      forgetTalk(talk.id);
      throw new Error("the browser's storage is full");
    }
    stored.push({ id: talk.id, updated: talk.updated, title });
    added += 1;
  }
  return added;
}

/** The conversations and the presets of a file: all that were exported, or a list, or one. Throws Error. */
function contents(value) {
  const { conversations, presets } = value ?? {};
  if (conversations !== undefined || presets !== undefined)
    return { talks: Array.from(conversations ?? [], talkFrom), presets: presetsFrom(presets) };
  return { talks: (Array.isArray(value) ? value : [value]).map(talkFrom), presets: {} };
}

export const counted = (count, noun) => `${count === 1 ? "one" : count} ${noun}${count === 1 ? "" : "s"}`;
