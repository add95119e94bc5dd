// One run on the screen: it lives on the server, the page follows its frames and can leave and come back at any time.

import { ApiError, Unreachable, call, stream } from "./api.js";
import { CardView, ended } from "./cards.js";
import { $, announce, bytes, make, say, seconds } from "./dom.js";
import { Strip } from "./strip.js";
import { showEarlier, totalsLine, totalsOf, share } from "./turns.js";

const RENDER_MS = 6; // of a frame's sixteen for texts; what does not fit waits for the next frame
const TILES_MS = 100;

/** Bring a record up to date with a frame, as the server does with its own. */
export function apply(document, frame) {
  if (frame.end) {
    Object.assign(document, frame.end);
    return;
  }
  const phase = (document[frame.phase] ??= { cards: [], steps: [], summary: null });
  for (const { i, more, ...changes } of frame.cards) {
    if (i === phase.cards.length) phase.cards.push({ text: "" });
    Object.assign(phase.cards[i], changes);
    phase.cards[i].text += more;
  }
  phase.steps.push(...frame.steps);
  phase.summary = frame.summary;
}

export class RunView {
  /** `changed` is called when the run begins or ends, `lost` when the server cannot be reached. */
  constructor({ changed, lost }) {
    this.changed = changed;
    this.lost = lost;
    this.strip = new Strip($("strip"), $("strip-note"));
    this.document = null;
    this.views = [];
    this.waiting = false;
    this.tilesAt = 0;
    this.singles = new Map(); // tokens per second of one stream, by model, for runs that do not show it themselves
    this.turn = 0;
    this.next = 0; // the card that is looked at first
    this.seen = 0; // the last frame
    this.abort = null;
  }

  get running() {
    return this.document?.state === "running";
  }

  /** Show a run by its id, from the beginning. Throws ApiError when there is none. */
  async open(id) {
    this.leave();
    await this.follow(id, null);
  }

  /** Stop following; the run goes on. */
  leave() {
    this.abort?.abort();
    this.abort = null;
    this.document = null;
    $("run").hidden = true;
    $("earlier").hidden = true;
  }

  /** Go on after a connection was lost. */
  async resume() {
    const id = this.document?.id;
    if (id && this.running) await this.follow(id, this.seen);
  }

  async follow(id, after) {
    this.abort?.abort();
    const abort = (this.abort = new AbortController());
    const path = `/swarmbench/runs/${id}/events${after === null ? "" : `?after=${after}`}`;
    let over = false;
    try {
      await stream(path, abort.signal, (name, data, number) => {
        if (abort.signal.aborted) return;
        if (number !== null) this.seen = number;
        if (name === "snapshot") this.show(data);
        else if (name === "frame") this.take(data);
        else over = name === "end";
      });
    } catch (error) {
      if (error.name === "AbortError") return;
      if (error instanceof ApiError) throw error;
      if (error instanceof Unreachable && !abort.signal.aborted) this.lost();
      return;
    }
    if (!over && !abort.signal.aborted) this.lost(); // the server went away in good order, the run not yet at its end
  }

  show(document) {
    const again = this.document?.id === document.id;
    this.document = document;
    this.views = [];
    this.states = [];
    $("cards").replaceChildren();
    $("last").replaceChildren();
    this.addViews();
    $("run").hidden = false;
    showEarlier(document);
    if (!again && document.earlier.length) $("run").scrollIntoView();
    say($("run-title"), document.question);
    this.head();
    this.strip.show(document);
    this.tiles();
    if (this.running) say($("totals"), "\u00a0"); // its line is kept, so that nothing moves at the end
    else this.settle();
    this.changed(this.document, again);
    this.wake();
  }

  /** A view for each card that has none yet: a graph's nodes may add others. */
  addViews() {
    const { cards } = this.document.together;
    for (let i = this.views.length; i < cards.length; i++) {
      const last = i >= this.agents;
      this.views.push(new CardView(cards[i], i, last ? 8 : i % 8, () => this.stop(i)));
      this.states.push(cards[i].state);
      $(last ? "last" : "cards").append(this.views[i].element);
    }
    $("cards").dataset.count = this.agents;
  }

  head() {
    const { model, created, settings, note, graph } = this.document;
    const when = new Date(created * 1000).toLocaleString([], { dateStyle: "medium", timeStyle: "short" });
    const what = graph ? `graph ${graph.name} (${graph.file})` : `at most ${settings.max_tokens} tokens each`;
    const told = [`${model.name} (${model.precision}, ${model.runner})`, when, what];
    if (!settings.sharing) told.push("prefix sharing off");
    if (note) told.push(note);
    say($("run-facts"), told.join(" · "));
  }

  take(frame) {
    apply(this.document, frame);
    if (frame.end) {
      this.head();
      this.settle();
      announce(`All have ended: ${this.outcome()}`);
      this.changed(this.document, true);
    } else if (frame.phase === "together") {
      this.addViews();
      this.listenFor(frame.cards);
    }
    this.wake();
  }

  listenFor(changes) {
    for (const { i } of changes) {
      const card = this.document.together.cards[i];
      if (ended(card) && this.states[i] !== card.state) announce(`${card.name}: ${card.state}`);
      this.states[i] = card.state;
    }
  }

  /** Bring the screen up to date, as far as one frame has time for it. */
  paint(now) {
    if (!this.document) return;
    this.strip.draw();
    const begin = performance.now();
    const count = this.views.length;
    let left = false;
    // Of two neighbours one is brought up to date in each frame: text grows sixty times a second, and the model, which
    // may run on the same cores, keeps half of what that would cost.
    this.turn = 1 - this.turn;
    for (let n = 0; n < count; n++) {
      const at = (this.next + n) % count;
      const view = this.views[at];
      if (!view.dirty) continue;
      const late = performance.now() - begin > RENDER_MS;
      if (!late && at % 2 === this.turn) {
        view.update(now);
      } else {
        if (late && !left) this.next = at; // first in the next frame, so that nobody starves
        left = true;
      }
    }
    if (now - this.tilesAt > TILES_MS) {
      this.tiles();
      this.tilesAt = now;
    }
    if (left) this.wake();
  }

  wake() {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame((now) => {
      this.waiting = false;
      this.paint(now);
    });
  }

  tiles() {
    const { together, one_by_one: alone, single_tokens_per_s: told, same_texts: same, settings } = this.document;
    const sum = together.summary;
    if (!sum) {
      for (const name of ["rate", "prefix", "kv", "alone"]) {
        say($(`tile-${name}`), "–");
        say($(`tile-${name}-note`), "\u00a0");
      }
      if (!settings.one_by_one) say($("tile-alone-note"), this.alone());
      return;
    }
    const { name } = this.document.model;
    const single = told ?? singleRate(together.steps) ?? this.singles.get(name);
    if (single) this.singles.set(name, single);
    say($("tile-rate"), `${Math.round(sum.tokens_per_s)} tok/s`);
    const times = single ? `, ${(sum.tokens_per_s / single).toFixed(1)}× one stream (${Math.round(single)})` : "";
    const drafted = sum.tokens_a_pass > 1.05 ? `, ${sum.tokens_a_pass.toFixed(1)} tokens a pass` : "";
    say($("tile-rate-note"), `${seconds(sum.wall_s)}${times}${drafted}`);
    say($("tile-prefix"), `${sum.prefix_tokens} tokens`);
    const cached = together.cards.slice(0, this.agents).reduce((total, card) => total + card.cached_tokens, 0);
    say($("tile-prefix-note"), settings.sharing ? `${cached} tokens not computed again` : "sharing is off");
    const live = this.running && sum.kv_held > 0;
    say($("tile-kv"), `${bytes(live ? sum.kv_held : sum.kv_peak_held)} held`);
    say($("tile-kv-note"), `${bytes(live ? sum.kv_saved : sum.kv_peak_saved)} saved by sharing`);
    this.compare(sum, alone?.summary, same, settings);
  }

  get agents() {
    return this.document.together.cards.length - (this.document.settings.synthesis ? 1 : 0);
  }

  compare(sum, alone, same, settings) {
    if (alone) {
      say($("tile-alone"), `${seconds(alone.wall_s)} vs ${seconds(sum.wall_s)}`);
      const done = this.document.one_by_one.cards.filter(ended).length;
      const equal = same === null ? `${done} of ${this.agents} have ended` : `${same} of ${this.agents} answers equal`;
      const factor = this.running ? "" : `${(alone.wall_s / sum.wall_s).toFixed(1)}× as fast, `;
      say($("tile-alone-note"), factor + equal);
    } else {
      say($("tile-alone"), "–");
      const text = settings.one_by_one ? (this.running ? "comes after the synthesis" : "was not run") : this.alone();
      say($("tile-alone-note"), text);
    }
  }

  /** Why there is no comparison. */
  alone() {
    return this.document.graph ? "not of a graph" : "switch it on to compare";
  }

  outcome() {
    const sum = this.document.together.summary;
    return sum ? `${sum.tokens} tokens in ${seconds(sum.wall_s)}, ${Math.round(sum.tokens_per_s)} tokens per second` : "nothing ran";
  }

  settle() {
    const steps = this.document.together.steps.length;
    const widest = this.document.together.summary?.widest ?? 0;
    say($("totals"), totalsLine(totalsOf(this.document)));
    this.strip.settle(`${steps} steps, at most ${widest} in the batch. Point at a step, or use the arrow keys, to see who was in it.`);
    this.tiles();
  }

  async stop(card) {
    if (!this.running) return;
    await call("POST", `/swarmbench/runs/${this.document.id}/stop`, card === undefined ? {} : { card });
  }
}

/** Tokens per second of a stream that is alone in the batch: the median of such steps. */
function singleRate(steps) {
  const alone = steps.filter((step) => step[2] === 1 && step[3] === 0 && step[4] > 0).map((step) => step[4] / step[1]);
  if (alone.length < 4) return null;
  alone.sort((a, b) => a - b);
  return alone[alone.length >> 1] * 1000;
}

/** A line for the history: what a thread is, when its latest turn was, and how much that one had not to compute. */
export function threadLine(thread) {
  const told = [new Date(thread.created * 1000).toLocaleString([], { dateStyle: "short", timeStyle: "short" }), thread.model];
  if (thread.turns > 1) told.push(`${thread.turns} turns`);
  if (share(thread.totals)) told.push(`${share(thread.totals)} reused`);
  if (thread.state !== "done") told.push(thread.state);
  return make("span", { className: "quiet" }, told.join(" · "));
}
