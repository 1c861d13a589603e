"use strict";
// What all widgets share: the data, text for people, elements, colours, and when to draw again.
// Text goes into the page by textContent alone, so nothing in the data is ever read as HTML.

const report = JSON.parse(document.getElementById("data").textContent);
const redraws = new Map();   // by widget: how to draw it again at another width or in other colours
let chosenSide = 0;

function formatBytes(n) {
  for (const [unit, size] of [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20]]) {
    if (Math.abs(n) >= size) return `${(n / size).toFixed(2)} ${unit}`;
  }
  return `${Math.round(n).toLocaleString("en")} B`;
}

function formatTime(ns) {
  for (const [unit, size] of [["s", 1e9], ["ms", 1e6], ["µs", 1e3]]) {
    if (Math.abs(ns) >= size) return `${(ns / size).toFixed(3)} ${unit}`;
  }
  return `${Math.round(ns)} ns`;
}

// Ticks at round numbers of the unit that the largest value has, and their texts.
function axisOf(scale, side, units, count) {
  const most = d3.max(scale.domain());
  const [unit, size] = units.find(([, each]) => most >= each) || units[units.length - 1];
  const ticks = d3.ticks(scale.domain()[0] / size, most / size, count);
  return side(scale).tickValues(ticks.map(tick => tick * size))
    .tickFormat(value => `${d3.format("~r")(Number((value / size).toPrecision(6)))} ${unit}`);
}
const BYTES = [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10], ["B", 1]];
const TIMES = [["s", 1e9], ["ms", 1e6], ["µs", 1e3], ["ns", 1]];

const words = kind => kind.replaceAll("_", " ");

function element(parent, tag, text = "", attributes = {}) {
  const made = document.createElement(tag);
  made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  parent.append(made);
  return made;
}

function section(id, title, note) {
  const made = element(document.getElementById("main"), "section", "", { id });
  element(made, "h2", title);
  if (note) element(made, "p", note, { class: "note" });
  element(document.getElementById("contents"), "a", title, { href: `#${id}` });
  return made;
}

function table(parent, heads, rows, numbers = []) {
  const box = element(parent, "div", "", { class: "scroll", tabindex: 0 });
  const made = element(box, "table");
  const head = heads.length ? element(element(made, "thead"), "tr") : null;
  heads.forEach((text, i) => element(head, "th", text, numbers.includes(i)
    ? { class: "number", scope: "col" } : { scope: "col" }));
  const body = element(made, "tbody");
  for (const row of rows) {
    const line = element(body, "tr");
    row.forEach((text, i) => element(line, "td", text,
      { class: numbers.includes(i) ? "number" : /^[A-Za-z]+$/.test(text) ? text : "" }));
  }
  return body;
}

function button(parent, text, label, act) {
  const made = element(parent, "button", text, { type: "button", "aria-label": label });
  made.addEventListener("click", act);
  return made;
}

function legend(parent, kinds) {
  const made = element(parent, "div", "", { class: "legend" });
  for (const [name, key] of kinds) {
    element(made, "span", name).style.setProperty("--key", `var(--${key})`);
  }
}

const colour = name => getComputedStyle(document.documentElement)
  .getPropertyValue(`--${name}`).trim();
const KINDS = ["forward", "backward", "recompute", "optimizer", "all_gather", "reduce_scatter",
  "all_reduce", "broadcast", "all_to_all", "copy"];
const kindColour = kind => colour(KINDS.includes(kind) ? kind : "other");

// A canvas as wide as its parent and as sharp as the screen; returns its context and width.
function sharp(canvas, height) {
  const ratio = window.devicePixelRatio || 1, width = canvas.parentNode.clientWidth || 900;
  canvas.style.height = `${height}px`;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = "12px system-ui, sans-serif";
  context.textBaseline = "middle";
  return [context, width];
}

function hatched(context, x, y, width, height, ink) {
  context.save();
  context.beginPath();
  context.rect(x, y, width, height);
  context.clip();
  context.strokeStyle = ink;
  context.lineWidth = 1.5;
  context.beginPath();
  for (let at = Math.floor((x - height) / 6) * 6; at < x + width; at += 6) {
    context.moveTo(at, y + height);
    context.lineTo(at + height, y);
  }
  context.stroke();
  context.restore();
}

function fresh(box, height, label) {
  box.replaceChildren();
  const width = box.clientWidth || 900;
  const svg = d3.select(box).append("svg").attr("viewBox", `0 0 ${width} ${height}`)
    .attr("height", height).attr("role", "img").attr("aria-label", label);
  return [svg, width];
}

const tipBox = document.getElementById("tip");
const hideTip = () => { tipBox.hidden = true; };
document.addEventListener("scroll", hideTip, true); // what it told of is no longer below the pointer
document.documentElement.addEventListener("pointerleave", hideTip);
document.addEventListener("pointermove", event => {
  if (!event.target.closest?.(".draw")) hideTip();
});
function tip(event, text) {
  tipBox.hidden = !text;
  if (!text) return;
  tipBox.textContent = text;
  const right = Math.min(event.clientX + 14, window.innerWidth - tipBox.offsetWidth - 6);
  const below = Math.min(event.clientY + 14, window.innerHeight - tipBox.offsetHeight - 6);
  tipBox.style.left = `${Math.max(4, right)}px`;
  tipBox.style.top = `${Math.max(4, below)}px`;
}

// Enter and space act as a click on what has the focus.
function pressed(node, act) {
  node.addEventListener("click", act);
  node.addEventListener("keydown", event => {
    if (event.key === "Enter" || event.key === " ") { event.preventDefault(); act(); }
  });
}

function drawn(name, draw) { redraws.set(name, draw); draw(); }
function drawAll() { for (const draw of redraws.values()) draw(); }
