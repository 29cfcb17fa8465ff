"use strict";
// The page: streams a text with trees and then by plain decoding from a server, or shows the one that it holds.

const $ = id => document.getElementById(id);
const data = JSON.parse($("data").textContent), form = $("form");
const NODE_HINT = $("node").textContent;
const END_ROOM = 3; // pixels from its end at which a text still follows what is written
let runs = {}, shown = null, follows = true, abort = null, isDue = false;

function newRun(name, settings) {
  return {name, settings, steps: [], words: [], tokens: 0, rounds: 0, drafted: [], accepted: [], isShared: false};
}

function addStep(run, {text, ids, tree, prefill_s, decode_s, is_shared, finish_reason}) {
  if (prefill_s !== undefined) Object.assign(run, {prefill_s, decode_s, isShared: is_shared});
  if (finish_reason) run.finish_reason = finish_reason;
  if (!ids) {
    if (text) run.steps.at(-1).text += text;
    return;
  }
  run.steps.push({text, ids, tree});
  run.tokens += ids.length;
  if (!tree) return;
  run.rounds += 1;
  const counts = depthCounts(tree);
  counts.drafted.forEach((count, depth) => { run.drafted[depth] = (run.drafted[depth] ?? 0) + count; });
  counts.accepted.forEach((count, depth) => { run.accepted[depth] = (run.accepted[depth] ?? 0) + count; });
}

// Counts the drafted nodes of a tree by depth; the children of the root have depth 1, at place 0.
function depthCounts(tree) {
  const drafted = [], accepted = [], depths = [0], path = new Set(tree.path);
  for (let node = 1; node < tree.tokens.length - 1; node++) {
    depths[node] = depths[tree.parents[node]] + 1;
    const place = depths[node] - 1;
    drafted[place] = (drafted[place] ?? 0) + 1;
    accepted[place] = (accepted[place] ?? 0) + path.has(node);
  }
  return {drafted, accepted};
}

function say(message, isProblem = false) {
  $("status").textContent = message;
  $("status").classList.toggle("problem", isProblem);
}

// Draws what has changed, once a frame.
function update() {
  if (isDue) return;
  isDue = true;
  requestAnimationFrame(() => {
    isDue = false;
    Object.values(runs).forEach(writeText);
    writeFigures();
    showStep();
  });
}

function writeText(run) {
  const {words} = run, last = words.at(-1), made = document.createDocumentFragment();
  if (words.length === run.steps.length && (!last || last.textContent === run.steps.at(-1).text)) return;
  const box = $(run.name), isAtEnd = box.scrollHeight - box.scrollTop - box.clientHeight < END_ROOM;
  if (last) last.textContent = run.steps[words.length - 1].text;
  while (words.length < run.steps.length) {
    const word = document.createElement("span");
    word.textContent = run.steps[words.length].text;
    word.dataset.step = words.length;
    words.push(word);
    made.append(word);
  }
  box.append(made);
  if (isAtEnd && !run.finish_reason) box.scrollTop = box.scrollHeight;
}

const later = run => Math.max(run.tokens - 1, 0); // the prompt's pass gives the first token
const decoding = run => run.tokens > 1 && run.decode_s > 0 ? later(run) / run.decode_s : null;
const whole = run => run.prefill_s + run.decode_s > 0 ? run.tokens / (run.prefill_s + run.decode_s) : null;
const number = (value, digits) => value == null || !Number.isFinite(value) ? "–" : value.toFixed(digits);
const FIGURES = [
  ["tokens after the first", run => later(run)],
  ["steps", run => run.rounds],
  ["tokens a step", run => number(later(run) / run.rounds, 2)],
  ["seconds of prefill", run => number(run.prefill_s, 2)],
  ["seconds of decoding", run => number(run.decode_s, 2)],
  ["tokens/s without prefill", run => number(decoding(run), 0)],
  ["tokens/s with prefill", run => number(whole(run), 0)],
];

function writeFigures() {
  const columns = (data.server ? ["trees", "plain"] : ["trees"]).map(name => runs[name]);
  $("figures").tBodies[0].replaceChildren(...FIGURES.map(([name, value]) => row(name, columns.map(run => run?.steps.length ? value(run) : "–"))));
  const [trees, plain] = columns;
  $("verdict").textContent = trees?.finish_reason && plain?.finish_reason ? verdict(trees, plain) : "";
}

function row(name, values) {
  const made = document.createElement("tr"), head = document.createElement("th");
  head.scope = "row";
  head.textContent = name;
  made.append(head);
  for (const value of values) made.insertCell().textContent = value;
  return made;
}

function verdict(trees, plain) {
  const [first, second] = [trees, plain].map(run => run.steps.flatMap(step => step.ids));
  const differs = first.findIndex((token, place) => token !== second[place]);
  const isSame = differs < 0 && first.length === second.length, parts = [];
  if (trees.settings.temperature > 0 && !data.server.is_match) {
    parts.push("Not the same text: above temperature 0 these are two draws from one distribution.");
  } else if (isSame) {
    parts.push(`Same text: yes, all ${first.length} tokens.`);
  } else {
    const place = differs < 0 ? second.length : differs;
    parts.push(`Same text: no, from token ${place + 1} on. On GPUs and in bfloat16 a near-tie may be rounded otherwise.`);
  }
  if (decoding(trees) && decoding(plain)) {
    const [own, other] = [trees, plain].map(run => run.decode_s / run.rounds);
    parts.push(`Decoding with trees: ${number(decoding(trees) / decoding(plain), 2)} times as fast; a step takes ${number(own / other, 1)} times as long.`);
  }
  if (trees.isShared || plain.isShared) parts.push("Other requests ran at the same time: these speeds are not those of one text alone.");
  return parts.join(" ");
}

// Shows the step that is chosen, or the last one.
function showStep() {
  const run = shown?.run;
  $("steps").hidden = !run?.rounds;
  if (!run?.rounds) return;
  const last = run.steps.length - 1;
  if (follows) shown.step = last;
  const {step} = shown, {tree} = run.steps[step], slider = $("step");
  if (shown.drawn === step && shown.last === last) return;
  slider.max = last;
  slider.value = step;
  if (shown.drawn !== step) {
    document.querySelector("pre .current")?.classList.remove("current");
    run.words[step].classList.add("current");
    if (!follows) reveal(run.words[step]);
    $("node").textContent = NODE_HINT;
    const box = $("tree").parentElement;
    $("tree").toggleAttribute("hidden", !tree);
    if (tree) {
      box.scrollLeft = drawTree($("tree"), tree, `Token tree of step ${step}`) - box.clientWidth / 2;
    } else {
      $("node").textContent = "The first token comes from the pass over the prompt: it has no tree.";
    }
    $("save-svg").setAttribute("aria-disabled", !tree);
  }
  const counts = tree ? depthCounts(tree) : {drafted: [], accepted: []}, sum = parts => parts.reduce((a, b) => a + b, 0);
  const nodes = sum(counts.drafted), drafted = nodes ? `${sum(counts.accepted)} of ${nodes} drafted nodes accepted` : "nothing drafted";
  const told = tree ? `${drafted}, ${tree.kept} token${tree.kept > 1 ? "s" : ""} kept` : "no tree";
  $("step-name").textContent = run.name === "plain" ? "A step of plain decoding" : "The tree of a step";
  $("step-label").textContent = `Step ${step} of ${last}: ${told}`;
  slider.setAttribute("aria-valuetext", $("step-label").textContent);
  writeCounts(run, counts);
  Object.assign(shown, {drawn: step, last});
}

// Scrolls a text, and not the page, to a word.
function reveal(word) {
  const box = word.parentElement, top = word.offsetTop - box.offsetTop;
  if (top < box.scrollTop || top + word.offsetHeight > box.scrollTop + box.clientHeight) box.scrollTop = top - box.clientHeight / 2;
}

// Writes what is known of a node.
function point(box) {
  document.querySelector("#tree .pointed")?.classList.remove("pointed");
  box.classList.add("pointed");
  $("node").textContent = box.querySelector("title").textContent;
}

function writeCounts(run, counts) {
  const share = ({accepted, drafted}, place) => drafted[place] ? `${accepted[place]} of ${drafted[place]}` : "–";
  const lines = run.drafted.map((_, place) => row(place + 1, [share(counts, place), share(run, place)]));
  $("depths").hidden = !lines.length;
  $("depths").tBodies[0].replaceChildren(...lines);
}

function choose(run, step) {
  shown = run === shown?.run ? shown : {run};
  follows = step >= run.steps.length - 1 && !run.finish_reason;
  shown.step = Math.max(0, Math.min(step, run.steps.length - 1));
  update();
}

function begin(name, settings) {
  const run = runs[name] = newRun(name, settings);
  const prompt = document.createElement("span");
  prompt.className = "prompt";
  prompt.textContent = settings.prompt;
  $(name).replaceChildren(prompt);
  $(name).scrollTop = $(name).scrollHeight;
  return run;
}

function save(name, type, text) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], {type}));
  link.download = name;
  link.click();
  URL.revokeObjectURL(link.href);
}

const exported = ({settings, steps, prefill_s, decode_s, finish_reason}) => ({settings, steps, prefill_s, decode_s, finish_reason});

$("save-svg").onclick = () => {
  if (shown.run.steps[shown.step].tree) save(`step-${shown.step}.svg`, "image/svg+xml", svgFile($("tree")));
};
$("save-json").onclick = () => {
  const parts = Object.values(runs).map(run => [run.name, exported(run)]);
  save("run.json", "application/json", JSON.stringify({server: data.server, ...Object.fromEntries(parts)}));
};
$("step").oninput = event => choose(shown.run, +event.target.value);
for (const name of ["trees", "plain"]) {
  $(name).onclick = event => event.target.dataset.step && choose(runs[name], +event.target.dataset.step);
}
$("tree").onpointerover = event => {
  const box = event.target.closest("g > g");
  if (box) point(box);
};
$("tree").parentElement.onkeydown = event => {
  const move = {ArrowUp: -1, ArrowDown: 1}[event.key], boxes = [...$("tree").querySelectorAll("g > g")];
  if (!move || !boxes.length) return;
  event.preventDefault();
  const index = boxes.findIndex(box => box.classList.contains("pointed"));
  point(boxes[Math.min(Math.max(index + move, 0), boxes.length - 1)]);
};
document.addEventListener("keydown", event => {
  const move = {ArrowLeft: -1, ArrowRight: 1}[event.key];
  if (event.key === "Escape") abort?.abort();
  if (!move || !shown || event.altKey || event.ctrlKey || event.metaKey || event.target.closest("input, textarea, .scroll")) return;
  event.preventDefault();
  choose(shown.run, shown.step + move);
});
