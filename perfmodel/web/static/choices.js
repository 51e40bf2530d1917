// Views that help to choose: chips that are a list, selects that fill fields, the gallery's search. After app.js.
"use strict";

// Ticked values are one field: `devices=h100-sxm-80gb,mi300x`.
function setList(name) {
  const ticked = $$(`input[data-list="${CSS.escape(name)}"]:checked`).map((each) => each.value);
  $(`#controls [name="${CSS.escape(name)}"]`).value = ticked.join(",");
  show(true);
}

document.addEventListener("change", (event) => {
  const element = event.target;
  if (element.dataset.list) setList(element.dataset.list);
  if (element.dataset.into && element.value) setFields({ [element.dataset.into]: element.value });
  if (element.dataset.sets && element.value) setFields(JSON.parse(element.value));
});

// ---------------------------------------------------------------- the techniques

let search = "";  // it stays while answers change
const opened = new Set();  // so do families and techniques that were opened

const nameOf = (details) => details.dataset.text ?? $("h2", details).textContent;

// Where something is searched for, families with techniques of that name are open, and the others are not there.
function filterTechniques() {
  const words = search.toLowerCase().split(/\s+/).filter(Boolean), techniques = $$(".technique");
  let matches = 0;
  for (const technique of techniques) {
    technique.hidden = !words.every((word) => technique.dataset.text.includes(word));
    technique.open = opened.has(nameOf(technique));
    matches += !technique.hidden;
  }
  for (const family of $$(".family")) {
    family.hidden = !$(".technique:not([hidden])", family);
    family.open = words.length > 0 || opened.has(nameOf(family));
  }
  if (techniques.length && words.length) $("#found").textContent = `${matches} of ${techniques.length} techniques`;
  $("#none-found")?.toggleAttribute("hidden", matches > 0);
}

document.addEventListener("toggle", (event) => {
  const details = event.target;
  if (!details.matches?.(".technique, .family") || search) return;
  opened[details.open ? "add" : "delete"](nameOf(details));
}, true);

document.addEventListener("input", (event) => {
  if (!event.target.dataset.filter) return;
  search = event.target.value;
  filterTechniques();
});

function readyTechniques() {
  const box = $("[data-filter]");
  if (box && !box.value) box.value = search;
  filterTechniques();
}
document.addEventListener("htmx:afterSwap", readyTechniques);
readyTechniques();
