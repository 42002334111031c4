// Charts of the last minutes, with one value per second, drawn as SVG.

import { $, el, say, svg } from "../dom.js";

const WIDTH = 360;
const HEIGHT = 120;
const LEFT = 40;
const TOP = 8;
const BOTTOM = 18;
const SPANS = [60, 120, 300];

const milliseconds = (seconds) =>
  seconds >= 10
    ? `${seconds.toFixed(0)} s`
    : seconds >= 1
      ? `${seconds.toFixed(1)} s`
      : `${Number((seconds * 1000).toPrecision(2))} ms`;
const count = (value) => (value >= 10000 ? `${Math.round(value / 1000)}k` : String(Math.round(value)));

const CHARTS = [
  {
    title: "Tokens per second",
    write: count,
    idle: 0,
    lines: [["generated", "generated", (bin) => bin.generation_tokens]],
  },
  {
    title: "Time to first token",
    write: milliseconds,
    idle: null,
    lines: [
      ["middle", "median", (bin) => bin.first_token?.[0]],
      ["high", "p95", (bin) => bin.first_token?.[1]],
    ],
  },
  {
    title: "Between tokens",
    write: milliseconds,
    idle: null,
    lines: [
      ["middle", "median", (bin) => bin.between_tokens?.[0]],
      ["high", "p95", (bin) => bin.between_tokens?.[1]],
    ],
  },
];

/** Keeps the values of the last minutes by second. The server may send a second more than once. */
export class History {
  constructor() {
    this.bins = new Map();
    this.seconds = 300;
  }

  add(bins, now) {
    for (const bin of bins) this.bins.set(bin.second, bin);
    for (const second of this.bins.keys()) if (second < now - this.seconds) this.bins.delete(second);
  }

  /** One entry per second up to the last complete one, at least a minute; undefined where nothing happened. */
  series(now) {
    const first = Math.min(now, ...this.bins.keys());
    const length = SPANS.find((span) => span >= now - first) ?? this.seconds;
    return Array.from({ length }, (_, index) => this.bins.get(now - length + index));
  }

  /** Mean tokens per second of the last complete seconds. */
  rate(field, now, seconds = 3) {
    let sum = 0;
    for (let second = now - seconds; second < now; second++) sum += this.bins.get(second)?.[field] ?? 0;
    return sum / seconds;
  }
}

export class Charts {
  constructor() {
    this.charts = CHARTS.map((chart) => new Chart(chart));
    $("charts").append(...this.charts.map((chart) => chart.element));
  }

  update(history, now) {
    const series = history.series(now);
    for (const chart of this.charts) chart.update(series);
  }
}

class Chart {
  constructor(definition) {
    this.definition = definition;
    this.values = definition.lines.map(() => []);
    this.paths = definition.lines.map(([name]) => svg("path", { class: `line ${name}` }));
    this.dots = definition.lines.map(([name]) => svg("path", { class: `line dots ${name}` }));
    this.area = svg("path", { class: "area" });
    this.grid = [0, 0.5, 1].map((share) => {
      const y = TOP + (1 - share) * (HEIGHT - TOP - BOTTOM);
      return {
        share,
        label: svg("text", { x: LEFT - 6, y: y + 4, class: "tick end" }),
        rule: svg("path", { d: `M${LEFT} ${y}H${WIDTH}`, class: "grid" }),
      };
    });
    this.rule = svg("path", { class: "cursor" });
    this.begin = svg("text", { x: LEFT, y: HEIGHT - 3, class: "tick" });
    const end = svg("text", { x: WIDTH, y: HEIGHT - 3, class: "tick end" }, "now");
    this.figure = svg(
      "svg",
      { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": definition.title },
      ...this.grid.flatMap(({ label, rule }) => [rule, label]),
      this.begin,
      end,
      ...(definition.idle === 0 ? [this.area] : []),
      ...this.paths,
      ...this.dots,
      this.rule,
    );
    this.readings = definition.lines.map(([name, label]) => {
      const value = el("b", {}, "–");
      return {
        value,
        item: el("li", {}, el("i", { class: `dash ${name}`, "aria-hidden": "true" }), label, " ", value),
      };
    });
    this.when = el("li", { class: "when" }, "now");
    this.element = el(
      "section",
      { class: "sheet chart", "aria-label": definition.title },
      el("h2", {}, definition.title),
      el(
        "ul",
        { class: "readings" },
        this.readings.map(({ item }) => item),
        this.when,
      ),
      this.figure,
    );
    this.at = null;
    this.figure.addEventListener("pointermove", (event) => this.#point(event));
    this.figure.addEventListener("pointerleave", () => this.#point(null));
  }

  update(series) {
    const { lines, idle } = this.definition;
    this.values = lines.map(([, , read]) => series.map((bin) => (bin ? (read(bin) ?? idle) : idle)));
    say(this.begin, `${series.length / 60} min ago`);
    const most = nice(Math.max(...this.values.flat().map((value) => value ?? 0)));
    const step = (WIDTH - LEFT) / (series.length - 1);
    const y = (value) => TOP + (1 - value / most) * (HEIGHT - TOP - BOTTOM);
    this.values.forEach((values, index) => {
      this.paths[index].setAttribute("d", line(values, step, y));
      this.dots[index].setAttribute("d", dots(values, step, y));
    });
    if (idle === 0)
      this.area.setAttribute(
        "d",
        `M${LEFT} ${HEIGHT - BOTTOM}${line(this.values[0], step, y).replace("M", "L")}V${HEIGHT - BOTTOM}Z`,
      );
    for (const { share, label } of this.grid) say(label, share * most ? this.definition.write(share * most) : "0");
    this.#read();
  }

  #point(event) {
    if (event) {
      const box = this.figure.getBoundingClientRect();
      const x = ((event.clientX - box.left) / box.width) * WIDTH;
      this.at = x < LEFT ? null : Math.round(((x - LEFT) / (WIDTH - LEFT)) * (this.values[0].length - 1));
      this.rule.setAttribute("d", this.at === null ? "" : `M${x} ${TOP}V${HEIGHT - BOTTOM}`);
    } else {
      this.at = null;
      this.rule.setAttribute("d", "");
    }
    this.#read();
  }

  /** Shows the values under the pointer, or the latest ones. */
  #read() {
    const { write, title, lines } = this.definition;
    const length = this.values[0].length;
    this.readings.forEach(({ value }, index) => {
      const values = this.values[index];
      const found = this.at === null ? values.findLast(known) : values[this.at];
      say(value, known(found) ? write(found) : "–");
    });
    say(this.when, this.at === null ? "latest" : `${length - this.at} s ago`);
    if (this.at !== null) return;
    const spoken = lines.map(([, label], index) => `${label} ${this.readings[index].value.textContent}`).join(", ");
    this.figure.setAttribute("aria-label", `${title}, the last ${length / 60} minutes. Latest: ${spoken}`);
  }
}

const known = (value) => value !== null && value !== undefined;
const point = (value, index, step, y) => `${(LEFT + index * step).toFixed(1)} ${y(value).toFixed(1)}`;

/** An SVG path through the values, with gaps where there is none. */
function line(values, step, y) {
  let path = "";
  let drawing = false;
  values.forEach((value, index) => {
    if (known(value)) path += `${drawing ? "L" : "M"}${point(value, index, step, y)}`;
    drawing = known(value);
  });
  return path;
}

/** The values without neighbours, which a line cannot show; they are drawn as points. */
function dots(values, step, y) {
  const lone = (value, index) => known(value) && !known(values[index - 1]) && !known(values[index + 1]);
  return values.map((value, index) => (lone(value, index) ? `M${point(value, index, step, y)}h0.01` : "")).join("");
}

/** Rounds up to 1, 2 or 5 times a power of ten. */
function nice(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((factor) => factor * power).find((bound) => bound >= value * 0.999);
}
