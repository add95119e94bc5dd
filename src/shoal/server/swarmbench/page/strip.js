// The batch, drawn: a column per step, as wide as the step was long and as high as the batch was wide.
// Two lanes share one time axis: together, and one by one.

import { bytes, say } from "./dom.js";

const ROW = 7; // pixels of one agent
const TOP = 9; // room for the marks of who joined
const GAP = 16; // between the lanes, for the label
const AXIS = 18;

// Places in a row of the server's table.
const [BEGIN, MS, BATCH, PREFILL, DECODE, TOOK, JOINED, LEFT, HELD, SAVED] = Array.from({ length: 10 }, (_, i) => i);

/** Whether a set of cards has that one. A graph may have more of them than bits that `&` looks at. */
const has = (bits, card) => Math.floor(bits / 2 ** card) % 2 === 1;

export class Strip {
  constructor(canvas, note) {
    this.canvas = canvas;
    this.note = note;
    this.pen = canvas.getContext("2d");
    this.document = null;
    this.picked = null; // {lane, index} of the step under the pointer or the arrow keys
    this.colours = [];
    canvas.addEventListener("pointermove", (event) => this.point(event));
    canvas.addEventListener("pointerdown", (event) => this.point(event));
    canvas.addEventListener("pointerleave", () => this.pick(null));
    canvas.addEventListener("keydown", (event) => this.key(event));
    canvas.addEventListener("blur", () => this.pick(null));
    new ResizeObserver(() => this.restart()).observe(canvas);
  }

  /** Show another run. */
  show(document) {
    this.document = document;
    this.picked = null;
    this.idle = "";
    this.restart();
  }

  lanes() {
    const { together, one_by_one: alone } = this.document;
    const agents = together.cards.length;
    const lanes = [{ name: "Together", phase: together, top: TOP, rows: Math.max(1, Math.min(agents, 8)) }];
    const top = TOP + lanes[0].rows * ROW + GAP;
    if (alone || this.document.settings.one_by_one) lanes.push({ name: "One by one", phase: alone, top, rows: 1 });
    return lanes;
  }

  /** Milliseconds that the width stands for. It grows in steps, so that what is drawn rarely moves. */
  span(lanes) {
    let end = 0;
    for (const { phase } of lanes) {
      const last = phase?.steps.at(-1);
      if (last) end = Math.max(end, last[BEGIN] + last[MS]);
    }
    if (this.document.state !== "running") return end || 1;
    let span = 1000;
    while (span < end) span *= span < 8000 ? 2 : 1.5;
    return span;
  }

  /** Forget what is drawn and draw all again. */
  restart() {
    if (!this.document) return;
    const lanes = this.lanes();
    const last = lanes.at(-1);
    this.height = last.top + last.rows * ROW + AXIS + (lanes.length > 1 ? 0 : 2);
    this.width = this.canvas.clientWidth;
    const scale = window.devicePixelRatio || 1;
    this.canvas.style.setProperty("height", `${this.height}px`);
    this.canvas.width = Math.round(this.width * scale);
    this.canvas.height = Math.round(this.height * scale);
    this.pen.setTransform(scale, 0, 0, scale, 0, 0);
    const style = getComputedStyle(this.canvas);
    this.colours = Array.from({ length: 9 }, (_, i) => style.getPropertyValue(`--agent-${i}`).trim());
    this.ink = style.getPropertyValue("--quiet").trim();
    this.line = style.getPropertyValue("--line").trim();
    this.other = style.getPropertyValue("--other").trim();
    this.drawn = lanes.map(() => 0);
    this.laneCount = lanes.length;
    this.ms = this.span(lanes);
    this.axis(lanes);
    this.draw();
  }

  axis(lanes) {
    const pen = this.pen;
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "alphabetic";
    const bottom = this.height - AXIS + 4;
    const step = [50, 100, 200, 250, 500, 1000, 2000, 5000, 10000, 20000, 60000].find(
      (ms) => (ms / this.ms) * this.width >= 64,
    );
    for (let ms = 0; ms <= this.ms; ms += step ?? this.ms) {
      const x = Math.round((ms / this.ms) * this.width) + 0.5;
      pen.fillStyle = this.line;
      pen.fillRect(x - 0.5, TOP - 4, 1, bottom - TOP + 4);
      pen.fillStyle = this.ink;
      const label = ms < 1000 && this.ms < 2000 ? `${ms} ms` : `${+(ms / 1000).toFixed(2)} s`;
      if (x + 40 < this.width) pen.fillText(label, x + 3, this.height - 3);
    }
    if (lanes.length > 1) pen.fillText("one by one", 3, lanes[1].top - 4);
  }

  /** Draw the steps that have come since the last time. */
  draw() {
    if (!this.document || this.width === 0) return;
    const lanes = this.lanes();
    if (lanes.length !== this.laneCount || this.span(lanes) !== this.ms) {
      this.restart();
      return;
    }
    lanes.forEach((lane, number) => {
      const steps = lane.phase?.steps ?? [];
      for (let i = this.drawn[number]; i < steps.length; i++) this.column(lane, steps[i]);
      this.drawn[number] = steps.length;
    });
  }

  column(lane, step) {
    const pen = this.pen;
    const agents = this.document.together.cards.length - (this.document.settings.synthesis ? 1 : 0);
    const x = (step[BEGIN] / this.ms) * this.width;
    const wide = Math.max(((step[MS] / this.ms) * this.width) - 0.4, 0.6);
    const base = lane.top + lane.rows * ROW;
    let level = 0;
    for (let card = 0; card <= agents; card++) {
      if (!has(step[TOOK], card) || level >= lane.rows) continue;
      pen.fillStyle = this.colours[card < agents ? card % 8 : 8];
      pen.globalAlpha = step[PREFILL] ? 0.55 : 1;
      pen.fillRect(x, base - (level + 1) * ROW + 1, wide, ROW - 1);
      level += 1;
    }
    pen.globalAlpha = 1;
    for (; level < Math.min(step[BATCH], lane.rows); level++) {
      pen.fillStyle = this.other; // somebody else's request in the same step
      pen.fillRect(x, base - (level + 1) * ROW + 1, wide, ROW - 1);
    }
    if (lane.rows > 1 && (step[JOINED] || step[LEFT])) {
      for (let card = 0; card <= agents; card++) {
        const joined = has(step[JOINED], card);
        if (!joined && !has(step[LEFT], card)) continue;
        pen.fillStyle = this.colours[card < agents ? card % 8 : 8];
        this.mark(joined ? x : x + wide, joined);
      }
    }
  }

  /** A small arrow above the lane: into the batch, or out of it. */
  mark(x, joined) {
    const pen = this.pen;
    pen.beginPath();
    pen.moveTo(x, joined ? TOP - 2 : TOP - 8);
    pen.lineTo(x - 3, joined ? TOP - 8 : TOP - 2);
    pen.lineTo(x + 3, joined ? TOP - 8 : TOP - 2);
    pen.fill();
  }

  /** The run has ended: the width is what it took. */
  settle(idle) {
    this.idle = idle;
    this.restart();
    if (!this.picked) say(this.note, idle);
  }

  point(event) {
    if (!this.document) return;
    const box = this.canvas.getBoundingClientRect();
    const lanes = this.lanes();
    const below = lanes.length > 1 && event.clientY - box.top > lanes[1].top - GAP / 2 ? 1 : 0;
    const ms = ((event.clientX - box.left) / this.width) * this.ms;
    const steps = lanes[below].phase?.steps ?? [];
    const index = steps.findIndex((step) => step[BEGIN] <= ms && ms < step[BEGIN] + step[MS] + 1);
    this.pick(index < 0 ? null : { lane: below, index });
  }

  key(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const lane = { ArrowUp: 0, ArrowDown: 1 }[event.key];
    if (!this.document || (by === undefined && lane === undefined)) return;
    event.preventDefault();
    const at = this.picked ?? { lane: 0, index: -1 };
    const lanes = this.lanes();
    const next = { lane: Math.min(lane ?? at.lane, lanes.length - 1), index: at.index + (by ?? 0) };
    const count = lanes[next.lane].phase?.steps.length ?? 0;
    if (count) this.pick({ ...next, index: Math.min(Math.max(next.index, 0), count - 1) });
  }

  /** Tell of one step in words. */
  pick(picked) {
    this.picked = picked;
    const lane = picked && this.lanes()[picked.lane];
    const step = lane?.phase?.steps[picked.index];
    if (!step) {
      say(this.note, this.idle || "\u00a0");
      return;
    }
    const cards = this.document.together.cards;
    const names = (bits) => cards.filter((_, i) => has(bits, i)).map((card) => card.name).join(", ");
    const what = step[PREFILL] ? `${step[PREFILL]} prompt tokens, ${step[DECODE]} decoded` : `${step[DECODE]} decoded`;
    const told = [
      `${lane.name}, step ${picked.index + 1}: ${step[BATCH]} in the batch, ${step[MS].toFixed(1)} ms, ${what}`,
      `KV ${bytes(step[HELD])} held, ${bytes(step[SAVED])} saved`,
    ];
    if (step[JOINED]) told.push(`joined: ${names(step[JOINED])}`);
    if (step[LEFT]) told.push(`left: ${names(step[LEFT])}`);
    say(this.note, told.join(" · "));
  }
}
