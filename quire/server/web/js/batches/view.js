// Batches and files: a file of requests is uploaded and answered behind everything else; its progress, and the results.

import { call } from "../api.js";
import { $, download, el, say } from "../dom.js";
import { size } from "../figures.js";

const ENDED = new Set(["completed", "failed", "expired", "cancelled"]);
const EVERY = 2000; // milliseconds between two looks
const NOT_KEPT = 404; // the status of a server that keeps no batches

export class Batches {
  constructor(frame) {
    this.frame = frame;
    this.timer = null;
    $("batch-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#try(() => this.#begin($("batch-file").files[0], $("batch-window").value));
    });
    $("batch-try").addEventListener("click", () => {
      const file = new File([$("batch-example").textContent], "example.jsonl", { type: "application/jsonl" });
      this.#try(() => this.#begin(file, $("batch-window").value));
    });
  }

  show() {
    if (this.timer !== null) return;
    this.timer = setInterval(() => this.#look(), EVERY);
    this.#look();
  }

  hide() {
    clearInterval(this.timer);
    this.timer = null;
  }

  keyChanged() {
    say($("batch-said"), "");
  }

  async #look() {
    if (this.looking) return;
    this.looking = true;
    await this.#try(async () => {
      const [batches, files] = await this.#lists();
      if (!batches.data.length && !$("batch-example").textContent)
        say($("batch-example"), example((await json("/v1/models")).data[0]?.id));
      fill($("batch-list"), batches.data, (batch) => this.#batch(batch, files.data));
      fill($("file-list"), files.data, (file) => this.#file(file));
      $("batch-none").hidden = batches.data.length > 0;
      $("file-none").hidden = files.data.length > 0;
    });
    this.looking = false;
  }

  /** The batches and the files. A server that keeps none has nothing to show but why. */
  async #lists() {
    let kept = true;
    try {
      return await Promise.all([json("/v1/batches?limit=100"), json("/v1/files?limit=100")]);
    } catch (error) {
      kept = error.status !== NOT_KEPT;
      throw error;
    } finally {
      for (const part of document.querySelectorAll(".batch-part")) part.hidden = !kept;
    }
  }

  /** Uploads a file and has its requests answered; all of them are for one endpoint, which the first names. */
  async #begin(file, within) {
    if (!file) return;
    say($("batch-said"), `Uploading ${file.name}`);
    const endpoint = await endpointOf(file);
    const form = new FormData();
    form.append("purpose", "batch");
    form.append("file", file);
    const { id } = await (await call("/v1/files", { method: "POST", body: form })).json();
    const body = { input_file_id: id, endpoint, completion_window: within };
    await call("/v1/batches", { method: "POST", body });
    $("batch-form").reset();
    say($("batch-said"), `${file.name} is answered behind everything else.`);
    this.#look();
  }

  #batch(batch, files) {
    const { total, completed, failed } = batch.request_counts;
    const name = files.find(({ id }) => id === batch.input_file_id)?.name ?? batch.input_file_id;
    const counts = `${completed + failed} of ${total}${failed ? `, ${failed} failed` : ""}`;
    const errors = batch.errors?.data.slice(0, 3).map(({ line, message }) => `line ${line ?? "?"}: ${message}`) ?? [];
    const buttons = [
      [batch.output_file_id, "Results"],
      [batch.error_file_id, "Errors"],
    ].map(([id, label]) =>
      id && this.#button(label, `${label} of ${name}`, () => save(id, `${batch.id}-${label}.jsonl`)));
    if (!ENDED.has(batch.status) && batch.status !== "cancelling")
      buttons.push(this.#button("Cancel", `Cancel ${name}`, () => this.#post(`/v1/batches/${batch.id}/cancel`)));
    return el("li", { id: batch.id },
      el("span", { class: "what" }, name,
        el("span", { class: "note" }, ` ${batch.endpoint}, ${time(batch.created_at)}`)),
      el("span", { class: "note" }, `${batch.status.replace("_", " ")}, ${counts}`),
      el("progress", { max: Math.max(total, 1), value: completed + failed, "aria-label": `Progress of ${name}` }),
      errors.length ? el("span", { class: "problem" }, errors.join("; ")) : null,
      el("span", { class: "buttons" }, buttons.filter(Boolean)));
  }

  #file(file) {
    return el("li", {},
      el("span", { class: "what" }, file.filename, el("span", { class: "note" }, ` ${time(file.created_at)}`)),
      el("span", { class: "note" }, `${file.purpose}, ${size(file.bytes)}`),
      el("span", { class: "buttons" },
        this.#button("Download", `Download ${file.filename}`, () => save(file.id, file.filename)),
        this.#button("Delete", `Delete ${file.filename}`, () => this.#delete(file.id))));
  }

  #button(text, label, act) {
    const onclick = () => this.#try(act);
    return el("button", { type: "button", class: "quiet small", "aria-label": label, onclick }, text);
  }

  async #post(path) {
    await call(path, { method: "POST" });
    this.#look();
  }

  async #delete(id) {
    await call(`/v1/files/${id}`, { method: "DELETE" });
    this.#look();
  }

  async #try(act) {
    try {
      await act();
      say($("batch-problem"), "");
    } catch (error) {
      say($("batch-problem"), error.message);
      if (error.needsKey) this.frame.askForKey(error.message);
    }
    $("batch-problem").hidden = !$("batch-problem").textContent;
  }
}

const json = async (path) => (await call(path)).json();

/** Shows a list anew, unless it is the same: what has the focus would lose it. */
function fill(list, objects, made) {
  const now = JSON.stringify(objects);
  if (list.dataset.shown === now) return;
  list.dataset.shown = now;
  list.replaceChildren(...objects.map(made));
}

/** A file of two requests, for people to see what one is. */
function example(model) {
  return ["Tell me a story about a fox.", "Tell me a story about a king."].map((content, index) =>
    JSON.stringify({
      custom_id: `request-${index + 1}`,
      method: "POST",
      url: "/v1/chat/completions",
      body: { model, messages: [{ role: "user", content }], max_tokens: 100 },
    })).join("\n");
}

async function endpointOf(file) {
  const [first] = (await file.slice(0, 1 << 20).text()).trimStart().split("\n");
  try {
    return JSON.parse(first).url ?? "/v1/chat/completions";
  } catch {
    throw new Error("The first line is not JSON: each line is a request with custom_id, method, url and body.");
  }
}

/** Saves a file's content, which a link cannot get where an API key is asked for. */
async function save(id, name) {
  download(name, await (await call(`/v1/files/${id}/content`)).blob());
}

const time = (seconds) => new Date(seconds * 1000).toLocaleString();
