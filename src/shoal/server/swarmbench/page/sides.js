// Two models, or two precisions of one, on the same question: the same team and seed, one after another, side by side.

import { call } from "./api.js";
import { chosen } from "./composer.js";
import { $, announce, make, say, seconds } from "./dom.js";
import { prefs } from "./prefs.js";

const LOOK_MS = 400;
const QUESTION = "Should our town build a swimming pool?";

/** Ask the loaded model and then `name`, which stays loaded; show both in a dialog. Both runs are in the history. */
export async function compareWith(name) {
  const question = $("question").value.trim() || $("run-title").textContent || QUESTION;
  const seed = prefs.seed === "" ? 1 : prefs.seed;
  const body = { question, agents: chosen(), max_tokens: prefs.maxTokens, temperature: prefs.temperature, synthesis: false, one_by_one: false, sharing: prefs.sharing, seed };
  const before = (await call("GET", "/swarmbench/state")).model;
  open(question, [before, name]);
  try {
    const first = await finished((await call("POST", "/swarmbench/runs", body)).id, before);
    say($("sides-state"), `loading ${name}`);
    await call("POST", "/models/load", { model: name, drain_s: 30 });
    const second = await finished((await call("POST", "/swarmbench/runs", body)).id, name);
    show([first, second]);
  } catch (error) {
    say($("sides-state"), error.message);
    throw error;
  }
}

function open(question, names) {
  say($("sides-title"), question);
  say($("sides-state"), `${names[0]} against ${names[1]}`);
  $("sides-body").replaceChildren();
  $("sides").showModal();
}

async function finished(id, name) {
  for (;;) {
    const run = await call("GET", `/swarmbench/runs/${id}`);
    const cards = run.together.cards;
    if (run.state !== "running") return run;
    say($("sides-state"), `${name} answers: ${cards.filter((card) => card.state === "done").length} of ${cards.length}`);
    await new Promise((resolve) => setTimeout(resolve, LOOK_MS));
  }
}

function show([first, second]) {
  const facts = (run) => `${run.model.name} (${run.model.precision}): ${run.together.summary.tokens_per_s.toFixed(0)} tok/s, ${seconds(run.together.summary.wall_s)}`;
  const same = first.together.cards.filter((card, i) => card.text === second.together.cards[i]?.text).length;
  const told = `${same} of ${first.together.cards.length} answers are the same, word for word`;
  say($("sides-state"), told);
  announce(told);
  const head = make("tr", {}, make("th", {}, ""), ...[first, second].map((run) => make("th", {}, facts(run))));
  const rows = first.together.cards.map((card, i) =>
    make("tr", {}, make("th", {}, card.name), ...[card, second.together.cards[i]].map((one) => make("td", {}, one?.text ?? ""))),
  );
  $("sides-body").replaceChildren(head, ...rows);
}
