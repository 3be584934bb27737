// @ts-check
"use strict";
/**
 * Things by their height in the graph, so that a frame looks at those in sight and not at all of them.
 *
 * Each thing lies once, on the lowest floor whose shelves are as high as it is (512, 4,096, ... units), on the shelf of its
 * top: what reaches into a stretch begins on a shelf of that stretch or on the one above. The order of two things is always
 * the same, whatever is in sight, and where one lies on a floor in another's order, they keep it.
 */

const LOWEST = 512, HIGHER = 8;

class Shelves {
  /** @param {any[]} things with `top` and `bottom`, or with `y` and `h` */
  constructor(things) {
    /** @type {Map<number, Map<number, any[]>>} */ const floors = new Map();
    for (const each of things) {
      const top = each.top ?? each.y, bottom = each.bottom ?? each.y + each.h;
      let size = LOWEST;
      while (size < bottom - top) size *= HIGHER;
      const floor = floors.get(size) ?? new Map(), at = Math.floor(top / size);
      if (!floors.has(size)) floors.set(size, floor);
      const shelf = floor.get(at);
      if (shelf) shelf.push(each); else floor.set(at, [each]);
    }
    this.floors = [...floors].sort(([a], [b]) => b - a); // the highest first: an open box is drawn before those in it
  }

  /** All that may reach into a stretch, and some beside it. @param {number} top @param {number} bottom @returns {any[]} */
  within(top, bottom) {
    /** @type {any[]} */ const found = [];
    for (const [size, floor] of this.floors) {
      const last = Math.floor(bottom / size);
      for (let at = Math.floor(top / size) - 1; at <= last; at++) for (const each of floor.get(at) ?? []) found.push(each);
    }
    return found;
  }
}
