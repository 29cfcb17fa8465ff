"use strict";
// Draws the token tree of one step as SVG: children under their parents, as d3-hierarchy lays them out.
// A tree has tokens (names, the target's own token last), parents, path, kept (tokens that the step has added to the
// text), special, and where they are known values, draft_probs (of its nodes) and target_probs (of the path's tokens).

const HEIGHT = 24, ROW = 54, GAP = 10, MARGIN = 12, LONGEST = 14; // pixels, and characters of a label
const MARKS = {root: "", accepted: "✓ ", refused: "", bonus: "+ ", beyond: "× "};
const SPACES = {" ": "␣", "\n": "⏎", "\r": "␍", "\t": "⇥"};
const pen = document.createElement("canvas").getContext("2d");
const widths = new Map();

// Writes whitespace and what has no shape of its own as visible characters.
function visible(name) {
  if (!name) return "(nothing)";
  const shown = name.replace(/[\p{C}\p{Z}]/gu, one => SPACES[one] ?? `\\u{${one.codePointAt(0).toString(16)}}`);
  return shown.replace(/^\p{M}/u, "◌$&");
}

function cut(text) {
  const characters = [...text];
  return characters.length > LONGEST ? characters.slice(0, LONGEST - 1).join("") + "…" : text;
}

function widthOf(label) {
  if (!widths.has(label)) {
    pen.font = "12px ui-monospace, monospace";
    widths.set(label, Math.ceil(pen.measureText(label).width) + 14);
  }
  return widths.get(label);
}

function percent(share) {
  return `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`;
}

// Returns what is known of every node: kind, depth, label, and a sentence.
function describe(tree) {
  const place = new Map(tree.path.map((node, index) => [node, index])), special = new Set(tree.special), nodes = [];
  tree.tokens.forEach((name, node) => {
    const isBonus = node === tree.tokens.length - 1, parent = tree.parents[node];
    const index = isBonus ? tree.path.length : place.get(node); // 0 for the root; the number of its token in the step
    const isKept = index <= tree.kept;
    const kind = node === 0 ? "root" : index === undefined ? "refused" : !isKept ? "beyond" : isBonus ? "bonus" : "accepted";
    const depth = parent < 0 ? 0 : nodes[parent].depth + 1, shown = visible(name), parts = [];
    parts.push({
      root: "the last token before the step", accepted: "drafted and accepted", refused: "drafted, refused",
      bonus: "the target's own token", beyond: "beyond the end of the text, not kept",
    }[kind], `depth ${depth}`);
    if (special.has(node)) parts.push("a special token, which the text does not show");
    const drafted = tree.draft_probs?.[node], target = tree.target_probs?.[index - 1]; // none of the bonus, and of the root
    if (node && !isBonus && tree.values) {
      const above = tree.values[parent], own = above > 0 ? ` (${percent(Math.min(tree.values[node] / above, 1))} if its parent is accepted)` : "";
      parts.push(`estimated chance of acceptance ${percent(tree.values[node])}${depth > 1 ? own : ""}`);
    }
    if (drafted != null) parts.push(`draft probability ${percent(drafted)}`);
    if (target != null) parts.push(`target's probability ${percent(target)}`);
    nodes.push({
      kind, depth, parent, isSpecial: special.has(node), label: MARKS[kind] + cut(shown),
      sentence: `${JSON.stringify(name)}: ${parts.join(", ")}`,
    });
  });
  return nodes;
}

function add(parent, name, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const key in attributes) made.setAttribute(key, attributes[key]);
  if (text !== undefined) made.textContent = text;
  parent.append(made);
  return made;
}

// Draws a tree into an svg element, in the place of what was there; returns the x of its root.
function drawTree(svg, tree, title) {
  const nodes = describe(tree), children = nodes.map(() => []);
  nodes.forEach((node, index) => index && children[node.parent].push(index));
  const size = nodes.map(node => widthOf(node.label));
  const layout = d3.tree().nodeSize([1, ROW]).separation((a, b) => (size[a.data] + size[b.data]) / 2 + GAP);
  const laid = layout(d3.hierarchy(0, index => children[index])).descendants();
  const left = Math.min(...laid.map(one => one.x - size[one.data] / 2)) - MARGIN;
  const right = Math.max(...laid.map(one => one.x + size[one.data] / 2)) + MARGIN;
  const top = -HEIGHT / 2 - MARGIN, height = Math.max(...laid.map(one => one.y)) - 2 * top;
  const made = document.createElementNS("http://www.w3.org/2000/svg", "g");
  for (const {data, x, y, parent} of laid) {
    if (!parent) continue;
    const from = parent.y + HEIGHT / 2, to = y - HEIGHT / 2, middle = (from + to) / 2;
    const d = `M${parent.x},${from}C${parent.x},${middle} ${x},${middle} ${x},${to}`;
    add(made, "path", {d, class: nodes[data].kind});
  }
  for (const {data, x, y} of laid) {
    const {kind, isSpecial, label, sentence} = nodes[data];
    const box = add(made, "g", {class: `${kind}${isSpecial ? " special" : ""}`, transform: `translate(${x},${y})`});
    add(box, "title", {}, sentence);
    const rx = {bonus: HEIGHT / 2, root: 0}[kind] ?? 4;
    add(box, "rect", {x: -size[data] / 2, y: -HEIGHT / 2, width: size[data], height: HEIGHT, rx});
    add(box, "text", {y: 4}, label);
  }
  svg.replaceChildren(made);
  svg.setAttribute("class", "tree");
  svg.setAttribute("viewBox", `${left} ${top} ${right - left} ${height}`);
  svg.setAttribute("width", right - left);
  svg.setAttribute("height", height);
  svg.setAttribute("aria-label", `${title}. ${nodes.filter(node => node.kind !== "refused").map(node => node.sentence).join("; ")}`);
  return -left;
}

// Returns a drawn tree as a document of its own, in the light colours.
function svgFile(svg) {
  svg.querySelector(".pointed")?.classList.remove("pointed");
  const copy = svg.cloneNode(true), properties = ["fill", "stroke", "stroke-width", "stroke-dasharray", "stroke-linecap", "font", "text-anchor"];
  svg.style.colorScheme = "light";
  const originals = svg.querySelectorAll("path, rect, text");
  copy.querySelectorAll("path, rect, text").forEach((one, index) => {
    const style = getComputedStyle(originals[index]);
    for (const property of properties) one.style.setProperty(property, style.getPropertyValue(property));
  });
  svg.style.colorScheme = "";
  copy.removeAttribute("id");
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  return new XMLSerializer().serializeToString(copy);
}
