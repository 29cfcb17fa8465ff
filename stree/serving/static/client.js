"use strict";
// The form: reads texts from the server that has sent the page; or, in a file, shows the text that it holds.

const OPTIONAL = ["top_p", "top_k"], NUMBERS = ["max_tokens", "temperature", "seed"];
const pause = seconds => new Promise(resolve => setTimeout(resolve, 1000 * seconds));

function settingsOfForm() {
  const settings = {prompt: form.prompt.value};
  for (const name of NUMBERS) settings[name] = +form[name].value;
  for (const name of OPTIONAL) if (form[name].value) settings[name] = +form[name].value;
  const size = form.budget.value.trim();
  if (size === "off") settings.budget = 1;
  else if (size && size !== "auto") settings.budget = +size;
  return settings;
}

// Writes prompt and settings into the address's fragment, which no server gets; the key is not among them.
function linkOfForm() {
  const fields = [...form.elements].filter(one => one.name && one.value).map(one => [one.name, one.value]);
  return `#${new URLSearchParams(fields)}`;
}

function fillForm() {
  for (const [name, value] of new URLSearchParams(location.hash.slice(1))) {
    if (form.elements[name]?.name === name) form.elements[name].value = value;
  }
}

// Leaves out of a growth's description what is not set.
function short(growth) {
  return growth.replace(/sampling=Sampling\(.*?\)(, )?/, "").replace(/(, )?\b\w+=None/g, "").replace("(, ", "(");
}

function startedWith({model, drafter, growth, budget, verifier}) {
  const size = budget === "auto" ? "tree size auto" : budget === 1 ? "no trees" : `at most ${budget} nodes a step`;
  const parts = [`drafter ${drafter}`, ...growth ? [`growth ${short(growth)}`] : [], size, `verifier ${verifier}`];
  return `Model ${model}, which continues the prompt as it stands, without a chat template; ${parts.join(", ")}.`;
}

async function generate(event) {
  event.preventDefault();
  if (abort) return;
  const settings = settingsOfForm(), link = linkOfForm();
  abort = new AbortController();
  $("run").setAttribute("aria-disabled", true);
  $("stop").setAttribute("aria-disabled", false);
  history.replaceState(null, "", link);
  [runs, shown, follows] = [{}, null, true];
  $("results").hidden = false;
  const plans = [["trees", settings], ["plain", {...settings, budget: 1}]].slice(settings.budget === 1 ? 1 : 0);
  for (const name of ["trees", "plain"]) $(name).replaceChildren();
  update();
  try {
    await untilReady();
    for (const [name, own] of plans) {
      say(`${name === "trees" ? "With trees" : "Plain decoding, same prompt and seed"} …`);
      const run = begin(name, own);
      shown ??= {run};
      await stream(run);
    }
    say(plans.length > 1 ? "Done: first with trees, then by plain decoding." : "Done.");
  } catch (error) {
    if (error.name === "AbortError") say("Stopped.");
    else say(error.isTold ? error.message : "The server cannot be reached: it has stopped, or the connection is broken.", true);
  } finally {
    abort = null;
    $("run").setAttribute("aria-disabled", false);
    $("stop").setAttribute("aria-disabled", true);
    update();
  }
}

const told = message => Object.assign(new Error(message), {isTold: true});

// Waits while the server warms up, so that no time of it is in a speed.
async function untilReady() {
  for (;;) {
    const response = await fetch("ready", {signal: abort.signal});
    if (response.ok) return;
    const {error} = await response.json();
    say(`The server is not ready, it warms up or stops: ${error.message}. Trying again …`);
    await pause(1);
    abort.signal.throwIfAborted();
  }
}

async function stream(run) {
  const headers = {"Content-Type": "application/json"}, key = $("key").querySelector("input").value;
  if (key) headers.Authorization = `Bearer ${key}`;
  const response = await fetch("demo/stream", {method: "POST", headers, body: JSON.stringify(run.settings), signal: abort.signal});
  if (!response.ok) throw told((await response.json()).error.message);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let held = ""; ;) {
    const {value, done} = await reader.read();
    if (done) break;
    const events = (held + value).split("\n\n");
    held = events.pop();
    for (const event of events) read(run, event.slice("data: ".length));
    update();
  }
  if (!run.finish_reason) throw told(`The stream broke off after ${run.tokens} tokens: the server has stopped.`);
}

function read(run, text) {
  if (text === "[DONE]") return;
  const event = JSON.parse(text);
  if (event.error) throw told(event.error.message);
  addStep(run, event);
}

function showFile({settings, steps, figures}) {
  for (const hidden of ["form", "plain-column"]) $(hidden).hidden = true;
  for (const line of $("figures").rows) line.cells[2]?.remove();
  const told = Object.entries(settings).filter(([name, value]) => name !== "prompt" && value != null);
  $("about").textContent = told.map(([name, value]) => `${name} ${name === "growth" ? short(value) : value}`).join(", ");
  $("results").hidden = false;
  const run = begin("trees", settings);
  for (const step of steps) addStep(run, step);
  Object.assign(run, figures);
  choose(run, 1);
}

if (data.server) {
  const {budget, needs_key, max_length} = data.server;
  form.max_tokens.max = max_length - 1;
  $("about").textContent = startedWith(data.server);
  $("words").hidden = false;
  for (const [name, meaning] of data.server.words) {
    for (const [kind, text] of [["dt", name], ["dd", meaning]]) {
      $("words").lastElementChild.appendChild(document.createElement(kind)).textContent = text;
    }
  }
  $("key").hidden = !needs_key;
  form.budget.placeholder = budget;
  form.budget.pattern = `off|${budget === "auto" ? "auto|" : ""}[1-9][0-9]*`;
  fillForm();
  form.onsubmit = generate;
  form.oninput = () => { $("link").href = linkOfForm(); };
  form.oninput();
  form.prompt.onkeydown = event => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit(); };
  $("stop").onclick = () => abort?.abort();
  window.onhashchange = () => { fillForm(); form.oninput(); };
} else {
  showFile(data.trees);
}
