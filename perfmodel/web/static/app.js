// The page's own behaviour: the form is the address, the address is the state; answers come from the server.
"use strict";

const $ = (selector, root = document) => root.querySelector(selector);
const $$ = (selector, root = document) => [...root.querySelectorAll(selector)];
let token = $("meta[name=perfmodel-token]").content;
const pageName = Math.random().toString(36).slice(2);  // of this tab: what it asked before is stopped when it asks anew, or closes

// ---------------------------------------------------------------- the state

// What the address says and no field of the page shows (another view's) stays.
function queryOf() {
  const pairs = new URLSearchParams(location.search);
  const fields = $$("input[name], select[name]").filter((element) => element.form?.id === "state");
  for (const { name } of fields) pairs.delete(name);
  const columns = [];
  for (const element of fields) {
    const value = markOf(element) || element.value.trim();
    if (element.name === "with") columns.push(value);
    else if (value !== "") pairs.set(element.name, value);
  }
  for (const column of columns) pairs.append("with", column);
  return pairs.toString();
}

// A dropped file shows its name; the address has what stands for it.
function markOf(element) {
  const mark = element.dataset.mark;
  return mark && mark.endsWith("/" + element.value) ? mark : "";
}

const currentView = () => document.body.dataset.view;

function addressOf(view = currentView()) {
  const query = queryOf();
  return "/" + view + (query ? "?" + query : "");
}

let pending = null, isNewStep = false;
let shown = location.pathname + location.search;

// A change is a step of the history; of a drag its beginning is, whose address each further move replaces.
function show(isStep, pauseMs = 0) {
  clearTimeout(pending);
  isNewStep ||= isStep;
  pending = setTimeout(() => {
    const address = addressOf();
    if (address === location.pathname + location.search) return;
    history[isNewStep ? "pushState" : "replaceState"]({}, "", address);
    isNewStep = false;
    shown = address;
    linkViews();
    keepOld();
    keepFocus();
    fetchInto("#answers", address);
  }, pauseMs);
}

// What goes wrong is said where htmx's own events are heard.
function fetchInto(target, address) {
  return htmx.ajax("GET", address, { target, swap: "innerHTML", source: "#state" }).catch(() => {});
}

function linkViews() {
  const query = location.search;
  for (const link of $$("nav.views a")) {
    link.href = "/" + link.dataset.view + query;
    link.toggleAttribute("aria-current", false);
    if (link.dataset.view === currentView()) link.setAttribute("aria-current", "page");
  }
  showTab();
}

// Where not all tabs fit, that of the view is in the middle of them.
function showTab() {
  const tabs = $("nav.views"), tab = $("[aria-current]", tabs);
  if (tab) tabs.scrollLeft = tab.offsetLeft - tabs.offsetLeft - (tabs.clientWidth - tab.clientWidth) / 2;
}

function openView(address) {
  const view = address.split("?")[0].slice(1) || "deployment";
  if (view !== currentView()) old.clear();
  shown = address;
  document.body.dataset.view = view;
  linkViews();
  return fetchInto("#main", address);
}

let toFocus = null;  // what had the focus where a button changed the view's fields, if it is there again

function showView(main) {
  document.title = ($("h1", main)?.textContent ?? "") + " · perfmodel";
  (toFocus?.() ?? main).focus({ preventScroll: true });
  toFocus = null;
}

// ---------------------------------------------------------------- what is old stays, in grey, until the new is there

const old = new Map();

function keepOld() {
  old.clear();
  for (const part of $$("#answers .part")) {
    const kept = [...part.children].filter((child) => !child.classList.contains("waiting"));
    if (kept.length && !$(".refusal, .begin", part)) old.set(part.id, kept);
  }
}

// What had the focus has it again, where it is there again.
let focused = "";

function keepFocus() { if ($("#answers")?.contains(document.activeElement)) focused = document.activeElement.id; }

function showFocus() {
  const element = focused && document.getElementById(focused);
  if (element && document.activeElement === document.body) element.focus({ preventScroll: true });
  focused = "";
}

function showOld(part) {
  const kept = old.get(part.id), waiting = $(".waiting", part);
  if (!kept || !waiting || $(".stale", part)) return;
  const stale = document.createElement("div");
  stale.className = "stale";
  stale.setAttribute("aria-hidden", "true");
  stale.inert = true;
  stale.append(...kept);
  stale.removeAttribute("id");
  $(".skeleton", waiting)?.remove();
  part.append(stale);
}

// ---------------------------------------------------------------- fields

function toSlider(range, value) {
  const low = Number(range.dataset.low), high = Number(range.dataset.high);
  const number = Math.min(Math.max(Number(value), low), high);
  if (!Number.isFinite(number)) return;
  const share = range.dataset.even ? (number - low) / (high - low) : Math.log(number / low) / Math.log(high / low);
  range.value = String(Math.round(1000 * share));
}

function fromSlider(range) {
  const low = Number(range.dataset.low), high = Number(range.dataset.high), share = range.value / 1000;
  const value = range.dataset.even ? low + share * (high - low) : low * (high / low) ** share;
  const step = Number(range.dataset.step);
  if (step && step < 1) return String(Math.round(value / step) * step).slice(0, 4);
  if (low >= 1) return String(Math.round(value >= 64 ? Number(value.toPrecision(2)) : value));
  return String(Number(value.toPrecision(2)));
}

function setSliders(root) {
  for (const range of $$("input[type=range]", root)) {
    const field = document.getElementById(range.dataset.for);
    toSlider(range, field.value || Number.parseFloat(field.placeholder) || range.dataset.low);
    range.setAttribute("aria-valuetext", field.value || field.placeholder);
    if (range.nextElementSibling?.matches("output")) range.nextElementSibling.textContent = field.value || field.placeholder;
  }
}

// What counts where a field is left empty comes with every answer.
function setDefaults() {
  const resolved = $("#resolved");
  if (!resolved) return;
  for (const [key, value] of Object.entries(JSON.parse(resolved.dataset.values))) {
    const field = $(`#state [name="${CSS.escape(key)}"]`);
    if (!field || !value) continue;
    if (field.tagName === "SELECT") {
      field.options[0].textContent = { true: "on", false: "off" }[value] ?? value;
    } else field.placeholder = value;
  }
  setSliders(document);
}

// A refusal that names a field is said where the field stands, too.
function setRefusals() {
  for (const field of $$(".field")) {
    $(".wrong", field)?.setAttribute("hidden", "");
    $("input:not([type=range]), select", field)?.removeAttribute("aria-invalid");
  }
  for (const sentence of $$("#answers .refusal:not(.of-column, .of-page) p").map((each) => each.textContent)) {
    const named = $$(".field[data-key]").filter((field) => {
      const key = field.dataset.key.replaceAll(/\W/g, "\\$&"), last = key.split(".").pop();
      return new RegExp(`\\b${key}\\b`).test(sentence) || new RegExp(`(--|\\b)${last}\\b`).test(sentence.split(":").slice(0, 3).join(":"));
    });
    for (const field of named.slice(0, 1)) {
      const wrong = $(".wrong", field);
      if (!wrong) continue;
      wrong.textContent = sentence;
      wrong.hidden = false;
      $("input:not([type=range]), select", field)?.setAttribute("aria-invalid", "true");
      field.closest("details.group")?.setAttribute("open", "");
    }
  }
}

function ready(root) {
  for (const each of $$("#controls [name]")) $(`#others .field[data-key="${CSS.escape(each.name)}"]`)?.remove();
  Plots.drawAll(root);
  setSliders(document);
  setDefaults();
  setRefusals();
}

let dragged = null, movedAt = 0;

document.addEventListener("input", (event) => {
  const element = event.target;
  if (element.matches("input[type=range]")) {
    const field = document.getElementById(element.dataset.for);
    field.value = fromSlider(element);
    element.setAttribute("aria-valuetext", field.value);
    show(element !== dragged || performance.now() - movedAt > 1000, 15);
    [dragged, movedAt] = [element, performance.now()];
  }
});

// A list of names shows what begins with what is there: for a mouse the field is emptied, so that all can be chosen from.
document.addEventListener("pointerdown", (event) => {
  const field = event.target;
  if (!field.matches("#state input[list]") || field === document.activeElement || !field.value) return;
  Object.assign(field.dataset, { kept: field.value, hint: field.placeholder });
  field.placeholder = field.value;
  field.value = "";
});
document.addEventListener("focusout", (event) => {
  const field = event.target;
  if (field.dataset?.kept === undefined) return;
  if (field.value === "") field.value = field.dataset.kept;
  field.placeholder = field.dataset.hint;
  delete field.dataset.kept;
});

document.addEventListener("change", (event) => {
  const element = event.target;
  if (element.id === "file" && element.files.length) { drop(element.files[0]); element.value = ""; return; }
  if (element.dataset.add !== undefined) { addField(element); return; }
  if (element.form?.id !== "state" || element.matches("input[type=range]")) return;
  setSliders(document);
  show(true);
});

document.addEventListener("submit", (event) => { event.preventDefault(); show(true); });

function addField(element) {
  const [key, ...rest] = element.value.split("=");
  if (!key.includes(".") || !rest.length) return;
  const field = document.createElement("input");
  field.name = key.trim();
  field.value = rest.join("=").trim();
  const frame = document.createElement("div"), label = document.createElement("label"), wrong = document.createElement("p");
  frame.className = "field";
  frame.dataset.key = field.name;
  label.textContent = field.name;
  field.id = label.htmlFor = "o-" + Math.random().toString(36).slice(2);
  wrong.className = "wrong";
  wrong.hidden = true;
  frame.append(label, field, wrong);
  $("#others").append(frame);
  element.value = "";
  show(true);
}

// ---------------------------------------------------------------- addresses, history, buttons

document.addEventListener("click", (event) => {
  const link = event.target.closest("nav.views a, a[data-open]");
  if (link && !event.metaKey && !event.ctrlKey && !event.shiftKey && event.button === 0) {
    event.preventDefault();
    const address = link.dataset.view ? addressOf(link.dataset.view) : link.getAttribute("href");
    if (link.dataset.open !== undefined) { location.href = address; return; }
    history.pushState({}, "", address);
    openView(address);
    return;
  }
  const copy = event.target.closest("[data-copy], [data-copy-from]");
  if (copy) {
    const text = copy.dataset.copy ?? $(copy.dataset.copyFrom).textContent;
    navigator.clipboard.writeText(text).then(() => say("Copied."), () => say("The browser did not let it be copied."));
    return;
  }
  if (event.target.closest("[data-share]")) share();
  const save = event.target.closest("[data-save]");
  if (save) saveFile(save.dataset.save + "?" + queryOf());
  if (event.target.closest("#theme")) setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
  if (event.target.closest("#read-line")) readLine();
  const set = event.target.closest("[data-set]");
  if (set) {
    const to = set.dataset.to;
    setFields(JSON.parse(set.dataset.set)).then(() => to && $(to)?.scrollIntoView({ block: "start" }));
  }
});

// A link to all that is shown; a long one is compressed by the server, which restores it.
async function share() {
  const answer = await (await fetch("/share?" + queryOf())).json().catch(() => ({ error: "The server does not answer." }));
  if (answer.error) { say(answer.error); return; }
  const link = `${location.origin}/${currentView()}${answer.query ? "?" + answer.query : ""}`;
  const lacks = /drop%3A/.test(queryOf()) ? " A dropped file is not in it." : "";
  await navigator.clipboard.writeText(link).then(() => say("Link copied." + lacks), () => say(link));
}

async function saveFile(address) {
  const answer = await fetch(address).catch(() => null);
  if (!answer?.ok) { say(answer ? (await answer.json()).error : "The server does not answer."); return; }
  Plots.download(/filename="(.+)"/.exec(answer.headers.get("content-disposition"))[1], await answer.blob());
}

// Values that a button sets, as what a gallery or a plan offers: {key: value}; null takes a key out.
function setFields(values) {
  const query = new URLSearchParams(queryOf());
  for (const [key, value] of Object.entries(values)) {
    query.delete(key);
    if (value !== null) query.append(key, value);
    for (const element of $$(`[name="${CSS.escape(key)}"]`)) setField(element, value ?? "");
  }
  const address = "/" + currentView() + (query.size ? "?" + query : "");
  if (address === location.pathname + location.search) return Promise.resolve();
  history.pushState({}, "", address);
  keepOld();
  const had = document.activeElement, set = had?.dataset?.set, card = had?.closest?.("[data-text]")?.dataset.text;
  toFocus = () => (had?.id ? document.getElementById(had.id) : null)
    ?? (set ? $(`[data-set="${CSS.escape(set)}"]`) : null)
    ?? (card ? $(`[data-text="${CSS.escape(card)}"] [data-set]:last-of-type`) : null);
  return openView(address);
}

function setField(element, value) {
  if (element.tagName === "SELECT" && value && ![...element.options].some((option) => option.value === value)) {
    element.append(new Option(value, value));
  }
  element.value = value;
}

// A step to a place within the page, as the skip link's, is none to another address.
window.addEventListener("popstate", () => { if (location.pathname + location.search !== shown) location.reload(); });

function say(sentence) {
  const status = $("#status");
  status.textContent = sentence;
  status.classList.add("seen");
  clearTimeout(say.timer);
  say.timer = setTimeout(() => status.classList.remove("seen"), 4000);
}

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  try { localStorage.setItem("theme", name); } catch { /* a private window */ }
  Plots.redraw();
}

// ---------------------------------------------------------------- htmx

const pageHeaders = () => ({ "x-perfmodel-token": token, "x-perfmodel-page": pageName });

// The server stops what nobody waits for any more: a tab says now and then that it is open, and when it closes.
setInterval(() => fetch("/open", { headers: pageHeaders() }).catch(() => {}), 30_000);
window.addEventListener("pagehide", () => fetch("/close", { method: "POST", headers: pageHeaders(), keepalive: true }).catch(() => {}));

document.addEventListener("htmx:configRequest", (event) => {
  Object.assign(event.detail.headers, pageHeaders());
  event.detail.parameters = event.detail.formData ? new FormData() : {};  // addresses say it all
});
// An answer to a part that has been replaced meanwhile is nobody's.
document.addEventListener("htmx:beforeSwap", (event) => {
  if (!event.detail.requestConfig.elt.isConnected) event.detail.shouldSwap = false;
});
document.addEventListener("htmx:afterSwap", (event) => {
  const target = event.detail.target;
  for (const part of target.matches(".part") ? [target] : $$(".part", target)) showOld(part);
  ready(target);
  if (target.id === "answers") showFocus();
  if (target.id === "main") showView(target);
});
document.addEventListener("htmx:afterRequest", (event) => {
  if (event.detail.elt.dataset?.line !== undefined && event.detail.successful) {
    event.detail.elt.textContent = JSON.parse(event.detail.xhr.responseText).lines.join("\n");
  }
});
// Tables that did not come say so where they would stand, and are asked for again when they are opened again.
function refuseRest(details, sentence) {
  const closed = details.cloneNode(true);
  closed.removeAttribute("open");
  $(".opened", closed).textContent = "...";
  details.replaceWith(closed);
  htmx.process(closed);
  say(sentence);
}

document.addEventListener("htmx:responseError", async (event) => {
  if (event.detail.xhr.status === 403 && await renewToken()) { askAgain(); return; }
  let sentence = "The server did not answer; is it still running?";
  try { sentence = JSON.parse(event.detail.xhr.responseText).error; } catch { /* no sentence */ }
  if (event.detail.elt.matches("details.rest")) refuseRest(event.detail.elt, sentence);
  else refuse(sentence);
});
document.addEventListener("htmx:sendError", (event) => {
  if (event.detail.elt.matches("details.rest")) refuseRest(event.detail.elt, "The server does not answer.");
  refuse("The server does not answer: it may have ended. Start perfmodel web again at the same port, and this page goes on.");
  clearInterval(waitForServer.timer);
  waitForServer.timer = setInterval(waitForServer, 1500);
});

async function waitForServer() {
  try { await fetch("/static/icon.svg"); } catch { return; }
  clearInterval(waitForServer.timer);
  askAgain();
}

function askAgain() {
  return fetchInto("#answers", addressOf());
}

function refuse(sentence) {
  const box = document.createElement("div"), text = document.createElement("p");
  box.className = "refusal";
  box.setAttribute("role", "alert");
  text.textContent = sentence;
  box.append(text);
  $("#answers .refusal.of-page")?.remove();
  box.classList.add("of-page");
  $("#answers").prepend(box);
  setRefusals();
}

try { const theme = localStorage.getItem("theme"); if (theme) document.documentElement.dataset.theme = theme; } catch { /* a private window */ }
if (!document.documentElement.dataset.theme) {
  document.documentElement.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
}
if (matchMedia("(max-width: 900px)").matches) $("details.form")?.removeAttribute("open");
$("details.form")?.classList.add("ready");
showTab();
addEventListener("resize", showTab);
const notes = JSON.parse(sessionStorage.getItem("notes") ?? "[]");
sessionStorage.removeItem("notes");
for (const note of notes) $("#line-notes")?.append(Object.assign(document.createElement("li"), { textContent: note }));
ready(document);
