// Deployments beside that of the form, up to three.
"use strict";

// Each is a hidden field of the form, whose value is the query of its own.
function setColumn(number, key, value) {
  const field = $$('#state input[name="with"]')[number - 1], own = new URLSearchParams(field.value);
  own.delete(key);
  if (value) own.append(key, value);
  field.value = own.toString();
  show(true);
}

document.addEventListener("change", (event) => {
  const element = event.target;
  if (element.dataset.column) setColumn(Number(element.dataset.column), element.dataset.of, element.value.trim());
});

document.addEventListener("click", (event) => {
  const more = event.target.closest("[data-duplicate]"), less = event.target.closest("[data-remove]");
  if (more) {
    const field = document.createElement("input");
    field.type = "hidden";
    field.name = "with";
    field.value = more.dataset.duplicate;
    const last = $$('#state input[name="with"]').pop();
    if (last) last.after(field); else $("#state").prepend(field);
    show(true);
  }
  if (less) {
    $$('#state input[name="with"]')[Number(less.dataset.remove) - 1].remove();
    show(true);
  }
});
