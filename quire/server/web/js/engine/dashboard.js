// Shows what the engine is doing, from one stream of events that is open only while the view is visible.

import { call, events } from "../api.js";
import { Answers } from "./answers.js";
import { BlockMap, decodePages, Hues } from "./blockmap.js";
import { BlockTable } from "./blocktable.js";
import { Charts, History } from "./charts.js";
import { $, el, say, sleep } from "../dom.js";
import { size, whole } from "../figures.js";
import { MemoryBars } from "./memory.js";
import { duration, Requests } from "./requests.js";

const PATH = "/v1/engine/events";
const RETRY_SECONDS = [1, 2, 5, 10];
const MINUTE = 60;
const FIGURES = [
  ["rate", "tokens/s"], ["running", "running"], ["waiting", "waiting"], ["cache", "KV cache held"],
  ["hits", "prefix hits"], ["preemptions", "preemptions"], ["deaths", "engine deaths"], ["replays", "replays"],
];

export class Dashboard {
  constructor(frame) {
    this.frame = frame;
    this.hues = new Hues();
    this.map = new BlockMap(this.hues, (id) => this.requests.mark(id), (id) => this.#explainRow(id));
    this.requests = new Requests(this.hues, {
      cancel: (id) => this.#cancel(id),
      explain: (id) => this.#explainRow(id),
      point: (id) => this.map.emphasise(id),
      showTable: (id) => this.table.open(id),
    });
    this.table = new BlockTable((error) => this.#refused(error));
    this.memory = new MemoryBars();
    this.answers = new Answers((id) => this.#explain(id));
    this.charts = new Charts();
    this.history = new History();
    this.prefixes = [];
    this.stream = null;
    this.figures = Object.fromEntries(FIGURES.map(([name, label]) => {
      const value = el("dd", {}, "–");
      const more = el("dd", { class: "more" });
      $("figures").append(el("div", { class: `figure ${name}` }, el("dt", {}, label), value, more));
      return [name, { value, more }];
    }));
  }

  show() {
    if (!this.stream) this.#watch();
    this.answers.show();
  }

  hide() {
    this.stream?.abort();
    this.stream = null;
    this.answers.hide();
  }

  keyChanged() {
    this.hide();
  }

  recolour() {
    this.map.recolour();
  }

  /** Reads events until the view is hidden; reconnects when the stream breaks. */
  async #watch() {
    const stream = (this.stream = new AbortController());
    for (let failures = 0; !stream.signal.aborted; failures++) {
      try {
        const response = await call(PATH, { signal: stream.signal });
        for await (const { event, data } of events(response)) {
          if (stream.signal.aborted) return;
          failures = 0;
          if (event === "hello") this.#hello(data);
          else await this.#state(data);
        }
        this.#live("The stream ended. Connecting again", "bad");
      } catch (error) {
        if (stream.signal.aborted) return;
        this.#live(
          error.needsKey ? "Needs an API key that may watch the engine" : `${error.message} Trying again`,
          "bad",
        );
        if (error.needsKey) {
          this.stream = null;
          this.frame.askForKey(error.message);
          return;
        }
      }
      const seconds = RETRY_SECONDS[Math.min(failures, RETRY_SECONDS.length - 1)];
      await sleep(seconds * 1000);
    }
  }

  #hello(data) {
    this.facts = data;
    this.history.seconds = data.kept_seconds;
    this.history.add(data.history, data.now);
    this.prefixes = [];
    this.#live("Live", "good");
  }

  async #state(state) {
    const now = Math.floor(state.now);
    this.history.add(state.history, now);
    this.#figures(state, now);
    this.charts.update(this.history, now);
    this.#facts(state);
    if (state.engine) {
      const { requests, pages, memory } = state.engine;
      this.hues.keepOnly(requests.map(({ id }) => id));
      this.requests.update(requests, state.stats.running + state.stats.waiting);
      const held = state.stats.used_blocks / Math.max(state.stats.total_blocks, 1);
      this.memory.update(memory, held, this.facts.info.device);
      this.map.update(await decodePages(pages), requests);
      this.table.update(requests, state.stats.running + state.stats.waiting <= requests.length);
      this.#live("Live", "good");
    } else if (state.asleep) {
      this.#live(`The model sleeps; ${state.open} open requests wait`, "slow");
    } else if (state.responsive) {
      this.#live("The engine is in a long step", "slow");
    } else {
      this.#live(`The engine is being replaced; ${state.open} open requests will go on`, "bad");
    }
  }

  #figures({ stats, deaths, replays, quarantined, now: clock }, now) {
    const rate = this.history.rate("generation_tokens", now);
    const prompt = this.history.rate("prompt_tokens", now);
    this.#figure("rate", whole(rate), prompt ? `${whole(prompt)} prompt/s` : "");
    this.#figure("running", stats.running, `of ${this.facts.limits.max_num_seqs}`);
    this.#figure("waiting", stats.waiting);
    this.#figure(
      "cache",
      share(stats.used_blocks, stats.total_blocks),
      [
        `${whole(stats.used_blocks)} of ${whole(stats.total_blocks)} blocks`,
        ...(stats.saved_blocks ? [`${whole(stats.saved_blocks)} saved by windows`] : []),
        ...(stats.tiers ?? []).map(({ name, pages }) => `${whole(pages)} in ${name}`),
      ].join(", "),
    );
    this.prefixes.push([clock, stats.prefix_queries, stats.prefix_hits]);
    while (this.prefixes[0][0] < clock - MINUTE) this.prefixes.shift();
    const [, queries, hits] = this.prefixes[0];
    const asked = stats.prefix_queries - queries;
    this.#figure(
      "hits",
      asked ? share(stats.prefix_hits - hits, asked) : share(stats.prefix_hits, stats.prefix_queries),
      asked ? `${share(stats.prefix_hits, stats.prefix_queries)} in all` : "of prompt tokens",
    );
    this.#figure("preemptions", whole(stats.preemptions));
    this.#figure("deaths", whole(deaths), quarantined ? `${quarantined} requests given up` : "");
    this.#figure("replays", whole(replays));
    for (const [name, value] of [["deaths", deaths], ["waiting", stats.waiting]]) {
      this.figures[name].value.parentElement.classList.toggle("raised", value > 0);
    }
  }

  #figure(name, value, more = "") {
    say(this.figures[name].value, String(value));
    say(this.figures[name].more, more);
  }

  #facts(state) {
    const { info, limits, models, version, started } = this.facts;
    const entries = [
      ["Model", models.join(", ")],
      ["Computes", `${info.dtype} on ${info.device}`],
      ["Attention", info.backend],
      ["Context", `${whole(info.max_model_len)} tokens`],
      ["KV cache",
        `${bytes(info.kv_bytes)}: ${whole(info.num_blocks)} blocks of ${info.block_size} tokens${cut(info)}`],
      ...(info.state_bytes ? [["States", `${bytes(info.state_bytes)} in addition to blocks`]] : []),
      ["Weights", bytes(info.weight_bytes)],
      ["Engine memory", state.engine?.resident_bytes ? bytes(state.engine.resident_bytes) : "–"],
      ["API memory", state.resident_bytes ? bytes(state.resident_bytes) : "–"],
      ["Step limit", `${whole(limits.max_num_batched_tokens)} tokens, ${whole(limits.max_num_seqs)} sequences`],
      ["Prefix caching", limits.enable_prefix_caching ? "on" : "off"],
      ["Generated", `${whole(state.stats.generation_tokens)} tokens in ${whole(state.stats.steps)} steps`],
      ["Up", duration(state.now - started)],
      ["Quire", version],
    ];
    const list = $("facts");
    if (list.children.length !== entries.length) {
      list.replaceChildren(...entries.map(([name]) => el("div", {}, el("dt", {}, name), el("dd"))));
    }
    entries.forEach(([, value], index) => say(list.children[index].lastChild, value));
  }

  #live(text, kind) {
    say($("live"), text);
    $("live").className = `live ${kind}`;
  }

  /** `id`: an answer's id, a hyphen and the number of the choice. */
  #explainRow(id) {
    this.#explain(id.replace(/-\d+$/, ""));
  }

  #explain(id) {
    this.frame.explain(id).catch((error) => this.#refused(error));
  }

  async #cancel(id) {
    try {
      await call(`/v1/requests/${encodeURIComponent(id)}`, { method: "DELETE" });
      return true;
    } catch (error) {
      if (error.status === 404) return true; // the request has just ended
      this.#refused(error);
      return false;
    }
  }

  #refused(error) {
    if (error.needsKey) this.frame.askForKey(error.message);
    else this.#live(error.message, "bad");
  }
}

const share = (part, all) => (all ? `${Math.round((100 * part) / all)} %` : "–");

/** Where layers of different sliding windows have pages of their own, the map and the figures count these. */
const cut = ({ num_blocks: pages, page_groups: groups }) =>
  groups > 1 ? `, each cut into ${groups} for layers of different windows: ${whole(pages * groups)} in all` : "";

const bytes = (count) => size(count, 2);
