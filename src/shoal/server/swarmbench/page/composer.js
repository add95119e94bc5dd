// The message box: the question, how many answer, and who.

import { $, make } from "./dom.js";
import { choose, prefs } from "./prefs.js";

let builtIn = [];

/** The specialists as they were chosen, all of them. */
export function team() {
  return prefs.team ?? builtIn.map((one, i) => ({ ...one, on: i < prefs.count }));
}

/** Those who answer, as the server wants them. */
export function chosen() {
  return team()
    .filter((one) => one.on && one.name.trim() && one.task.trim())
    .map(({ name, task }) => ({ name: name.trim(), task: task.trim() }));
}

function change(members) {
  const count = members.filter((one) => one.on).length;
  choose({ team: members, count });
  showCount();
}

/** The first `count` are ticked, unless as many are already. */
function setCount(count) {
  const members = team().map((one) => ({ ...one }));
  let on = members.filter((one) => one.on).length;
  for (const one of members) if (on < count && !one.on) (one.on = true), on++;
  for (const one of [...members].reverse()) if (on > count && one.on) (one.on = false), on--;
  change(members);
}

function showCount() {
  const count = team().filter((one) => one.on).length;
  for (const input of $("count").querySelectorAll("input")) input.checked = Number(input.value) === count;
}

function showTeam() {
  $("team-list").replaceChildren(
    ...team().map((one, i) => {
      const update = (changes) => change(team().map((other, n) => (n === i ? { ...other, ...changes } : other)));
      const on = make("input", { type: "checkbox", checked: one.on, attributes: { "aria-label": `${one.name} answers` } });
      on.onchange = () => {
        const others = team().filter((other, n) => n !== i && other.on).length;
        if (!on.checked && others === 0) on.checked = true; // somebody has to answer
        update({ on: on.checked });
      };
      const name = make("input", { value: one.name, maxLength: 60, className: "name", attributes: { "aria-label": `Name ${i + 1}` } });
      name.onchange = () => update({ name: name.value.trim() || (name.value = one.name) });
      const task = make("textarea", { value: one.task, maxLength: 1000, rows: 2, attributes: { "aria-label": `Role of ${one.name}` } });
      task.onchange = () => update({ task: task.value.trim() || (task.value = one.task) });
      return make("li", {}, on, name, task);
    }),
  );
}

/** Grow with the text, up to a third of the window. */
function fit() {
  const box = $("question");
  box.style.setProperty("height", "auto");
  box.style.setProperty("height", `${Math.min(box.scrollHeight, window.innerHeight / 3)}px`);
}

/** `send` and `stop` do what the buttons say. */
export function setUpComposer(specialists, send, stop) {
  builtIn = specialists;
  $("count").replaceChildren(
    ...builtIn.map((_, i) => {
      const input = make("input", { type: "radio", name: "count", value: i + 1, attributes: { "aria-label": `${i + 1} agents` } });
      input.onchange = () => setCount(i + 1);
      return make("label", {}, input, make("span", {}, String(i + 1)));
    }),
  );
  showCount();
  $("one-by-one").checked = prefs.oneByOne;
  $("one-by-one").onchange = () => choose({ oneByOne: $("one-by-one").checked });
  $("team-open").onclick = () => {
    showTeam();
    $("team").showModal();
  };
  $("team-reset").onclick = () => {
    choose({ team: null, count: builtIn.length });
    showTeam();
    showCount();
  };
  $("question").oninput = fit;
  $("question").onkeydown = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    }
  };
  $("send").onclick = send;
  $("stop").onclick = stop;
}

export function clearQuestion() {
  $("question").value = "";
  fit();
}
