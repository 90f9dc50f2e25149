"use strict";
(() => {
  const root = document.documentElement;
  const element = (id) => document.getElementById(id);
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];
  const stored = { // A page that is opened as a file may have no storage.
    read: () => { try { return localStorage.getItem("theme"); } catch { return null; } },
    write: (theme) => { try { localStorage.setItem("theme", theme); } catch { /* of no account */ } },
  };
  root.classList.add("scripted");
  if (stored.read()) root.dataset.theme = stored.read();
  element("theme").addEventListener("click", () => {
    const dark = matchMedia("(prefers-color-scheme: dark)").matches;
    const now = root.dataset.theme || (dark ? "dark" : "light");
    root.dataset.theme = now === "dark" ? "light" : "dark";
    stored.write(root.dataset.theme);
  });

  const tree = element("tree"), search = element("search"), followers = element("followers");
  const operators = all(".op", tree), branches = all(".branch", tree);
  all("li", tree).forEach((item, place) => { item.dataset.place = place; });
  const show = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    let matches = 0;
    for (const item of operators) {
      const follows = !words.length && !followers.checked && item.matches(".follows:not([data-bytes])");
      item.hidden = follows || !words.every((word) => item.dataset.name.includes(word));
      matches += !item.hidden;
    }
    for (const item of branches) {
      item.hidden = !item.querySelector(".op:not([hidden])");
      if (words.length) item.firstElementChild.open = true;
    }
    element("matches").textContent = words.length ? `${matches} of ${operators.length} rows` : "";
  };
  search.addEventListener("input", show);
  followers.addEventListener("change", show);
  show();
  document.addEventListener("keydown", (event) => {
    if (event.key === "/" && !event.target.matches("input, select")) {
      event.preventDefault();
      search.focus();
    } else if (event.key === "Escape" && event.target === search) {
      search.value = "";
      show();
    }
  });
  element("order").addEventListener("change", (event) => {
    const key = event.target.value;
    const order = key ? (a, b) => (b.dataset[key] || 0) - (a.dataset[key] || 0)
      : (a, b) => a.dataset.place - b.dataset.place;
    for (const list of [...all("ul", tree)].filter((each) => !each.closest(".card"))) {
      list.append(...[...list.children].sort(order));
    }
  });
  const open = (state) => all("details", tree).forEach((each) => { each.open = state; });
  element("expand").addEventListener("click", () => open(true));
  element("collapse").addEventListener("click", () => open(false));
  addEventListener("beforeprint", () => branches.forEach((each) => { each.firstElementChild.open = true; }));
  const slider = element("other-plan"), plans = all(".other-plan");
  if (slider) {
    const choose = () => {
      const chosen = Number(slider.value);
      plans.forEach((each, number) => { each.hidden = number !== chosen; });
      slider.setAttribute("aria-valuetext", plans[chosen].firstElementChild.textContent);
    };
    slider.addEventListener("input", choose);
    choose(); // A page that is loaded again may keep the place of the slider.
  }
  const zoom = element("zoom");
  if (zoom) {
    zoom.addEventListener("input", () => { element("canvas").style.width = `${100 * zoom.value}%`; });
  }
})();
