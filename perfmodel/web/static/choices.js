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

// ---------------------------------------------------------------- the gallery

let family = "", search = "";  // these stay while answers change

function filterGallery() {
  const words = search.toLowerCase().split(/\s+/).filter(Boolean);
  const cards = $$(".technique");
  let found = 0;
  for (const card of cards) {
    const isShown = (!family || card.dataset.family === family) && words.every((word) => card.dataset.text.includes(word));
    card.hidden = !isShown;
    found += isShown;
  }
  const status = $("#found");
  if (status && cards.length) status.textContent = `${found} of ${cards.length} techniques`;
  $("#none-found")?.toggleAttribute("hidden", found > 0);
}

function listFamilies() {
  const box = $("#families");
  if (!box || box.children.length || !$(".technique")) return;
  for (const name of ["", ...new Set($$(".technique").map((card) => card.dataset.family))]) {
    const chip = document.createElement("button");
    chip.type = "button";
    chip.className = "chip";
    chip.textContent = name || "all";
    chip.dataset.familyOf = name;
    chip.setAttribute("aria-pressed", String(name === family));
    box.append(chip);
  }
}

document.addEventListener("input", (event) => {
  if (!event.target.dataset.filter) return;
  search = event.target.value;
  filterGallery();
});
document.addEventListener("click", (event) => {
  const chip = event.target.closest("[data-family-of]");
  if (!chip) return;
  family = chip.dataset.familyOf;
  for (const each of $$("[data-family-of]")) each.setAttribute("aria-pressed", String(each === chip));
  filterGallery();
});

function readyGallery() {
  const box = $("[data-filter]");
  if (box && !box.value) box.value = search;
  listFamilies();
  filterGallery();
}
document.addEventListener("htmx:afterSwap", readyGallery);
readyGallery();
