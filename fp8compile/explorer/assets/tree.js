// @ts-check
"use strict";
/** The module tree at the left: a list with levels, for the mouse and for the keyboard. */

/** @param {any} view */
X.treeOf = (view) => {
  const host = X.byId("tree");
  /** @type {Map<string, HTMLElement>} */ const rows = new Map();
  /** @type {Set<string>} */ const unfolded = new Set();
  let drawnFor = null, most = 1;

  const bytesOf = (/** @type {any} */ box) => Object.values(box.bytes).reduce((/** @type {number} */ sum, b) => sum + /** @type {number} */ (b), 0);
  const isShown = (/** @type {any} */ box) => box.kind !== "group" && box.kind !== "own";
  const inside = (/** @type {any} */ box) => box.children.filter(isShown);

  const draw = () => {
    host.textContent = "";
    rows.clear();
    most = Math.max(1, ...inside(view.tree.root).map(bytesOf));
    add(view.tree.root, 0);
    mark();
  };
  const add = (/** @type {any} */ box, /** @type {number} */ level) => {
    const more = inside(box).length > 0, isOpen = box.kind === "root" || unfolded.has(box.key);
    const bytes = /** @type {number} */ (bytesOf(box));
    const alike = box.kind === "run" ? ` ×${box.members}` : "";
    const { added, removed, changed } = box.diff;
    const summary = [added && `+${added}`, removed && `−${removed}`, changed && `~${changed}`].filter(Boolean).join(" ");
    const row = X.el("div", { role: "treeitem", class: "row", tabindex: "-1", "aria-level": level + 1, "aria-expanded": more ? String(isOpen) : null,
      "data-key": box.key, style: `padding-left:${6 + 13 * level}px`, title: X.pathOf(box),
      "aria-label": `${X.pathOf(box)}, saves ${X.human(bytes)}` }, [
      X.el("span", { class: "twist", text: more ? (isOpen ? "▾" : "▸") : "", "aria-hidden": "true" }),
      X.el("span", { class: "name", text: `${box.label}${alike}` }),
      X.el("span", { class: summary ? "summary" : "size", text: summary || (bytes ? X.human(bytes) : "") }),
      bytes && !summary ? X.el("span", { class: "bar", style: `width:${Math.max(2, (38 * bytes) / /** @type {number} */ (most))}px`, "aria-hidden": "true" }) : null,
    ]);
    host.append(row);
    rows.set(box.key, row);
    if (isOpen) inside(box).forEach((/** @type {any} */ each) => add(each, level + 1));
  };
  const mark = () => {
    const key = view.selected ? moduleOf(view.selected.box).key : null;
    rows.forEach((row, each) => {
      row.setAttribute("aria-selected", String(each === key));
      row.tabIndex = each === (key ?? "") ? 0 : -1;
    });
    if (![...rows.values()].some((row) => row.tabIndex === 0) && rows.size) [...rows.values()][0].tabIndex = 0;
  };
  const moduleOf = (/** @type {any} */ box) => { while (!isShown(box)) box = box.parent; return box; };
  const boxAt = (/** @type {any} */ target) => { const row = target.closest(".row"); return row ? view.tree.byKey.get(row.dataset.key) : null; };
  const fold = (/** @type {any} */ box, /** @type {boolean} */ to) => {
    if (to) unfolded.add(box.key); else unfolded.delete(box.key);
    draw();
    rows.get(box.key)?.focus();
  };
  const choose = (/** @type {any} */ box) => {
    if (box.kind === "root") { view.select(null); view.fit(); } else view.reveal({ node: null, box });
    rows.get(box.key)?.focus();
  };

  host.addEventListener("click", (/** @type {any} */ e) => {
    const box = boxAt(e.target);
    if (!box) return;
    if (e.target.classList.contains("twist") && inside(box).length) fold(box, !unfolded.has(box.key));
    else { if (inside(box).length && !unfolded.has(box.key) && box.kind !== "root") unfolded.add(box.key); draw(); choose(box); }
  });
  host.addEventListener("keydown", (/** @type {any} */ e) => {
    const box = boxAt(e.target), list = [...rows.values()], at = list.indexOf(e.target);
    if (!box) return;
    if (e.key === "ArrowDown") list[Math.min(list.length - 1, at + 1)].focus();
    else if (e.key === "ArrowUp") list[Math.max(0, at - 1)].focus();
    else if (e.key === "ArrowRight" && inside(box).length) fold(box, true);
    else if (e.key === "ArrowLeft") { if (unfolded.has(box.key)) fold(box, false); else if (box.parent) rows.get(box.parent.key)?.focus(); }
    else if (e.key === "Enter" || e.key === " ") choose(box);
    else return;
    e.preventDefault();
  });
  view.changed.on(() => {
    if (drawnFor !== view.tree) {
      if (!drawnFor) inside(view.tree.root).forEach((/** @type {any} */ each) => { if (inside(each).length < 20) unfolded.add(each.key); });
      drawnFor = view.tree;
      draw();
    }
    mark();
  });
  view.chosen.on((/** @type {any} */ selected) => {
    if (selected) {
      let isNew = false;
      for (let at = moduleOf(selected.box).parent; at; at = at.parent) if (!unfolded.has(at.key) && at.kind !== "root") { unfolded.add(at.key); isNew = true; }
      if (isNew) draw();
    }
    mark();
    if (selected) rows.get(moduleOf(selected.box).key)?.scrollIntoView({ block: "nearest" });
  });
};
