"use strict";
(() => {
  const data = JSON.parse(document.getElementById("picture").textContent);
  const timeline = document.getElementById("timeline"), memory = document.getElementById("held");
  const tip = document.getElementById("tip"), told = document.getElementById("told");
  const KINDS = {
    F: "forward", B: "backward", I: "backward, input part", W: "backward, weight part", R: "recomputing", STEP: "optimizer", SYNC: "gradients are final",
    LOSS: "sum of the loss starts", SEND_F: "starts to send", SEND_B: "starts to send", POST_F: "starts to receive", POST_B: "starts to receive",
    RECV_F: "waits for an activation", RECV_B: "waits for a gradient",
  };
  const WORKS = new Set(["F", "B", "I", "W", "R", "STEP"]), RUNS = data.names, TAGS = RUNS.map((name) => name[0]);
  const HUES = [255, 55, 150, 345, 205, 100, 300, 25];  // of micro-batches, in turn; neighbours lie far apart
  const AXIS = 24, BAR = 22, SYNC = 7, GAP = 12, LABEL = 17, STRIP = 54;
  const MUCH = 2;  // a run so many times as long as the other is not drawn on the other's scale
  const view = { from: 0, to: data.ticks };
  const isMeasured = data.tracks.some((track) => track.runs.length > 1);
  let rows = [], chosen = null, hovered = null, gutter = 0, pageWidth = 1, isWide = true, drag = null;

  // ---- words ----------------------------------------------------------------------------------------------------
  const digits = (value) => (Math.abs(value) >= 100 ? value.toFixed(0) : Number(value.toPrecision(3)).toString());
  function time(ticks) {
    const seconds = (ticks / data.ticks) * data.seconds;
    const [scale, unit] = Math.abs(seconds) >= 0.9995 ? [1, "s"] : Math.abs(seconds) >= 0.9995e-3 ? [1e-3, "ms"] : [1e-6, "us"];
    return `${digits(seconds / scale)} ${unit}`;
  }
  function bytes(count) {
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let at = 0;
    while (count >= 1024 && at < 4) { count /= 1024; at += 1; }
    return `${at ? count.toFixed(count >= 100 ? 0 : 1) : count} ${units[at]}`;
  }
  const nameOf = (bar) => (bar[1] < 0 ? "" : bar[1]) + data.kinds[bar[0]] + (bar[2] < 0 ? "" : bar[2]);
  function namesOf(track, bar) {  // what may stand in it, the longest first
    if (bar[1] < 0) return [data.kinds[bar[0]]];
    const name = nameOf(bar), short = name.slice(String(bar[1]).length);
    return track.hasStages ? [name, short] : [short];
  }
  function describe(item) {
    const { row, bar } = item, run = row.track.runs[row.run];
    const place = `${run.device}${row.track.alike && row.run === 0 ? ` and ${row.track.alike} more` : ""}, ${RUNS[row.run]}`;
    if (row.what !== "bars") return `${bar[0]}\n${place}\n${time(bar[1])} to ${time(bar[2])}: ${time(bar[2] - bar[1])}`;
    const kind = data.kinds[bar[0]];
    const which = (bar[2] < 0 ? "" : ` of micro-batch ${bar[2]}`) + (bar[1] < 0 ? "" : `, stage ${bar[1]}`);
    const lines = [`${nameOf(bar)}: ${KINDS[kind]}${which}`, place, `${time(bar[3])} to ${time(bar[4])}: ${time(bar[4] - bar[3])}`];
    const other = row.track.runs[1 - row.run]?.bars.find((each) => nameOf(each) === nameOf(bar));
    if (other && WORKS.has(kind)) lines.push(`${RUNS[1 - row.run]}: ${time(other[4] - other[3])}`);
    return lines.join("\n");
  }

  // ---- places ---------------------------------------------------------------------------------------------------
  const messages = data.messages.map(([run, source, target, name, , start, end]) =>
    ({ run, source, target, microBatch: Number(/\d+$/.exec(name)[0]), start, end }));
  const ends = [0, 1].map((run) => Math.max(1, ...data.tracks.flatMap((track) => !track.runs[run] ? [] :
    ["bars", "syncs", "waits"].map((what) => track.runs[run][what].reduce((most, bar) => Math.max(most, bar.at(-1)), 0)))));
  const options = { messages: true, stretch: isMeasured && !data.isTogether && Math.max(...ends) > MUCH * Math.min(...ends) };
  const scaleOf = (run) => (options.stretch ? data.ticks / ends[run] : 1);
  const x = (tick, run) => gutter + ((tick * scaleOf(run) - view.from) / (view.to - view.from)) * (pageWidth - gutter);
  for (const track of data.tracks) {
    track.hasStages = new Set(track.runs.flatMap((run) => run.bars.map((bar) => bar[1]).filter((stage) => stage >= 0))).size > 1;
  }
  function place() {
    rows = [];
    pageWidth = timeline.clientWidth;
    isWide = pageWidth >= 720;
    gutter = isWide ? 168 : isMeasured ? 20 : 0;
    let y = AXIS + 4;
    for (const track of data.tracks) {
      if (!isWide) y += LABEL;
      track.y = y;
      track.runs.forEach((run, number) => {
        run.row = { track, run: number, what: "bars", list: run.bars, y, height: BAR };
        rows.push(run.row);
        y += BAR + 1;
        if (run.syncs.length) { rows.push({ track, run: number, what: "syncs", list: run.syncs, y, height: SYNC }); y += SYNC + 1; }
        if (run.waits.length) { rows.push({ track, run: number, what: "waits", list: run.waits, y, height: SYNC }); y += SYNC + 1; }
        y += 2;
      });
      track.bottom = y;
      y += GAP;
    }
    return y;
  }

  // ---- colours --------------------------------------------------------------------------------------------------
  let style = getComputedStyle(document.documentElement), palette = {};  // reading a style is slow, so each colour is read once
  const colour = (name) => (palette[name] ??= style.getPropertyValue(`--${name}`).trim());
  function fill(kind, microBatch) {
    if (kind === "STEP") return colour("other");
    const tone = kind === "F" || kind === "R" ? "forward" : "backward";
    const hue = HUES[microBatch % HUES.length];
    return (palette[tone + hue] ??= `oklch(${colour(tone)} ${hue})`);
  }
  function hatch(context, left, top, width, height) {
    context.save();
    context.beginPath(); context.rect(left, top, width, height); context.clip();
    context.strokeStyle = colour("card"); context.lineWidth = 1.5; context.beginPath();
    for (let at = Math.max(left, 0) - height - (Math.max(left, 0) % 6); at < Math.min(left + width, pageWidth); at += 6) {
      context.moveTo(at, top + height); context.lineTo(at + height, top);
    }
    context.stroke(); context.restore();
  }

  // ---- drawing --------------------------------------------------------------------------------------------------
  function prepare(canvas, height) {
    const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth;
    canvas.style.height = `${height}px`;
    canvas.width = Math.round(width * ratio); canvas.height = Math.round(height * ratio);
    const context = canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.font = '12px system-ui, -apple-system, "Segoe UI", sans-serif'; context.textBaseline = "middle";
    return context;
  }
  function axis(context, width, height) {
    const span = view.to - view.from, room = Math.max(2, Math.floor((width - gutter) / 90));
    const unit = data.ticks / (options.stretch ? 100 : data.seconds);  // where each run has a scale of its own, shares of it
    const rough = span / room / unit, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].find((each) => each * power >= rough) * power * unit;
    context.fillStyle = colour("soft"); context.strokeStyle = colour("line"); context.lineWidth = 1; context.textAlign = "center";
    for (let tick = Math.ceil(view.from / step) * step; tick <= view.to; tick += step) {
      const at = Math.round(gutter + ((tick - view.from) / span) * (width - gutter)) + 0.5;
      context.beginPath(); context.moveTo(at, AXIS - 4); context.lineTo(at, height); context.stroke();
      const text = tick === 0 ? "0" : options.stretch ? `${digits(tick / unit)}%` : time(tick), half = context.measureText(text).width / 2;
      context.fillText(text, Math.min(Math.max(at, gutter + half), width - half), AXIS / 2);
    }
  }
  function cut(context, text, width) {
    if (context.measureText(text).width <= width) return text;
    while (text && context.measureText(`${text}…`).width > width) text = text.slice(0, -1);
    return `${text}…`;
  }
  function label(context, track, y) {
    const name = track.name + (track.alike ? ` and ${track.alike} more` : "");
    context.textAlign = "left"; context.fillStyle = colour("text");
    if (!isWide) {
      context.fillText(cut(context, `${name}, ${track.title}`, pageWidth), 0, y - LABEL / 2);
      return;
    }
    context.fillText(cut(context, name, gutter - 12), 0, y + 8);
    context.fillStyle = colour("soft"); context.fillText(cut(context, track.title, gutter - 12), 0, y + 24);
  }
  function drawBar(context, row, bar) {
    const [number, , microBatch, start, end] = bar, kind = data.kinds[number];
    const left = x(start, row.run), width = Math.max(x(end, row.run) - left, 0.75);
    if (left > pageWidth || left + width < gutter) return 0;
    const works = WORKS.has(kind), focus = hovered ?? chosen;
    const others = focus && focus.row.what === "bars" && focus.bar[2] >= 0 && microBatch !== focus.bar[2];
    context.globalAlpha = others ? 0.3 : 1;
    context.fillStyle = works ? fill(kind, microBatch) : colour("wait");
    const top = works ? row.y : row.y + row.height / 2 - 2, height = works ? row.height : 4;
    context.fillRect(left, top, width > 4 ? width - 1 : width, height);
    if (works && (kind === "W" || kind === "R") && width > 3) hatch(context, left, top, width - 1, height);
    const from = Math.max(left, gutter), to = Math.min(left + width, pageWidth);
    const fits = (text) => to - from > Math.max(12, context.measureText(text).width + 6);
    const shown = works ? namesOf(row.track, bar).find(fits) : undefined;
    if (shown) {
      if (kind === "W" || kind === "R") {
        const half = context.measureText(shown).width / 2 + 3;
        context.fillStyle = fill(kind, microBatch); context.fillRect((from + to) / 2 - half, top + 3, 2 * half, height - 6);
      }
      context.fillStyle = colour("bar-text"); context.textAlign = "center";
      context.fillText(shown, (from + to) / 2, top + height / 2 + 1);
    }
    context.globalAlpha = 1;
    return 1;
  }
  function drawSmall(context, row, bar) {
    const left = x(bar[1], row.run), width = Math.max(x(bar[2], row.run) - left, 1);
    context.fillStyle = colour(row.what === "syncs" ? "other" : "wait");
    context.fillRect(left, row.y + 1, width > 3 ? width - 1 : width, row.height - 2);
  }
  function drawSegments(context, row) {
    context.fillStyle = colour("bar-text");
    for (const [, start, end] of row.track.runs[row.run].segments) {
      const left = x(start, row.run), width = x(end, row.run) - left;
      if (width > 2) context.fillRect(left + 0.5, row.y + row.height - 3, width - 1, 2);
    }
  }
  function drawMessages(context, isBright) {  // those of the chosen micro-batch above the bars, all others below
    if (!options.messages) return;
    const focus = hovered ?? chosen, wanted = focus && focus.row.what === "bars" ? focus.bar[2] : -1;
    const dense = data.messages.length > 400 ? 0.3 : 0.75;
    const path = new Path2D();
    for (const { run, source, target, microBatch, start, end } of messages) {
      const [from, to] = [data.tracks[source].runs[run]?.row, data.tracks[target].runs[run]?.row];
      if (!from || !to || from === to || (wanted === microBatch) !== isBright) continue;
      const down = to.y > from.y;
      path.moveTo(x(start, run), down ? from.y + BAR : from.y); path.lineTo(x(end, run), down ? to.y : to.y + BAR);
    }
    context.strokeStyle = colour("soft");
    context.globalAlpha = isBright ? 1 : wanted < 0 ? dense : 0.1; context.lineWidth = isBright ? 2 : 1; context.stroke(path);
    context.globalAlpha = 1;
  }
  function drawTimeline() {
    const height = place(), width = pageWidth, context = prepare(timeline, height);
    for (const row of rows) {
      context.fillStyle = colour("track"); context.fillRect(gutter, row.y, width - gutter, row.height);
    }
    axis(context, width, height);
    context.save();
    context.beginPath(); context.rect(gutter, AXIS, width - gutter, height - AXIS); context.clip();
    drawMessages(context, false);
    let count = 0;
    for (const row of rows) {
      for (const bar of row.list) row.what === "bars" ? (count += drawBar(context, row, bar)) : drawSmall(context, row, bar);
      if (row.what === "bars") drawSegments(context, row);
    }
    drawMessages(context, true);
    for (const item of [hovered, chosen].filter(Boolean)) outline(context, item);
    context.restore();
    for (const track of data.tracks) label(context, track, track.y);
    if (isMeasured) tags(context);
    timeline.dataset.bars = String(count);
  }
  function tags(context) {
    context.textAlign = "right";
    for (const row of rows.filter((each) => each.what === "bars")) {
      context.fillStyle = colour(row.run ? "measured" : "accent");
      context.fillText(TAGS[row.run], gutter - 6, row.y + BAR / 2 + 1);
    }
  }
  function outline(context, { row, bar }) {
    const [start, end] = bar.slice(-2);
    context.strokeStyle = colour("text"); context.lineWidth = 2;
    context.strokeRect(x(start, row.run), row.y - 1, Math.max(x(end, row.run) - x(start, row.run), 2), row.height + 2);
  }

  function drawMemory() {
    if (!memory) return;  // none was counted
    const step = STRIP + (isWide ? GAP : GAP + LABEL), width = pageWidth;
    const height = AXIS + 4 + data.tracks.length * step, context = prepare(memory, height);
    axis(context, width, height);
    data.tracks.forEach((track, number) => strip(context, track, AXIS + 4 + number * step + (isWide ? 0 : LABEL), width));
    memory.dataset.strips = String(data.tracks.length);
  }
  function strip(context, track, top, width) {
    const most = Math.max(...track.runs.flatMap((run) => run.memory.map((point) => point[1])), 1);
    const near = track.capacity <= 3 * most, scale = (STRIP - 4) / (near ? Math.max(track.capacity, most) * 1.06 : most * 1.35);
    const y = (count) => top + STRIP - count * scale;
    context.fillStyle = colour("track"); context.fillRect(gutter, top, width - gutter, STRIP);
    context.save();
    context.beginPath(); context.rect(gutter, top, width - gutter, STRIP); context.clip();
    track.runs.forEach((run, number) => run.memory.length && curve(context, run.memory, number, y, y(track.held)));
    const line = near ? Math.round(y(track.capacity)) + 0.5 : top + 5.5;
    context.strokeStyle = colour("limit"); context.lineWidth = 1.5; context.setLineDash(near ? [] : [7, 5]);
    context.beginPath(); context.moveTo(gutter, line); context.lineTo(width, line); context.stroke(); context.setLineDash([]);
    context.restore();
    const told = `peak ${bytes(most)}, limit ${bytes(track.capacity)}`;
    label(context, isWide ? { ...track, title: `peak ${bytes(most)}` } : { ...track, title: told }, top);
    if (isWide) { context.fillStyle = colour("limit"); context.fillText(cut(context, `limit ${bytes(track.capacity)}`, gutter - 12), 0, top + 40); }
  }
  function curve(context, points, run, y, held) {
    const path = new Path2D();
    let last = x(0, run), height = y(points[0][1]), top = height;  // of changes within half a pixel the highest is seen
    path.moveTo(last, height);
    for (const [tick, count] of points) {
      const at = x(tick, run);
      if (at - last >= 0.5) {
        path.lineTo(last, top); path.lineTo(last, height); path.lineTo(at, height);
        last = at; top = height;
      }
      height = y(count); top = Math.min(top, height);
    }
    path.lineTo(last, top); path.lineTo(last, height);
    last = x(ends[run], run);
    path.lineTo(last, height);
    const line = new Path2D(path);
    if (!run) {
      path.lineTo(last, y(0)); path.lineTo(x(0, run), y(0)); path.closePath();
      context.save(); context.clip(path);
      context.globalAlpha = 0.22; context.fillStyle = colour("accent"); context.fillRect(gutter, 0, pageWidth, held); context.globalAlpha = 1;
      context.fillStyle = colour("held"); context.fillRect(gutter, held, pageWidth, y(0) - held);
      context.restore();
    }
    context.strokeStyle = colour(run ? "measured" : "accent"); context.lineWidth = 1.5; context.stroke(line);
  }

  // ---- what a reader does ---------------------------------------------------------------------------------------
  let asked = false;
  function redraw() {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => { asked = false; drawTimeline(); drawMemory(); });
  }
  function look(from, to) {
    const span = Math.min(Math.max(to - from, data.ticks / 20000), data.ticks);
    view.from = Math.min(Math.max(from, 0), data.ticks - span);
    view.to = view.from + span;
    redraw();
  }
  function zoom(factor, at = (view.from + view.to) / 2) {
    look(at - (at - view.from) * factor, at + (view.to - at) * factor);
  }
  const tickAt = (left) => view.from + ((left - gutter) / (pageWidth - gutter)) * (view.to - view.from);
  function hit(left, top) {
    const row = rows.find((each) => top >= each.y - 1 && top <= each.y + each.height + 1);
    if (!row || left < gutter) return null;
    const bar = row.list.findLast((each) => { const [start, end] = each.slice(-2); return x(start, row.run) - 1 <= left && left <= Math.max(x(end, row.run), x(start, row.run) + 2); });
    return bar ? { row, bar } : null;
  }
  function show(item, left, top) {
    tip.hidden = !item;
    if (!item) return;
    tip.textContent = describe(item);
    const box = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(left + 14, innerWidth - box.width - 4))}px`;
    tip.style.top = `${top + 18 + box.height > innerHeight ? Math.max(4, top - box.height - 10) : top + 18}px`;
  }
  function choose(item) {
    chosen = item;
    told.textContent = item ? describe(item).replaceAll("\n", "; ") : "";
    if (!item) { show(null); redraw(); return; }
    const [start, end] = item.bar.slice(-2).map((tick) => tick * scaleOf(item.row.run));
    if (start < view.from || end > view.to) look((start + end - (view.to - view.from)) / 2, (start + end + (view.to - view.from)) / 2);
    redraw();
  }
  function move(key) {
    if (!chosen) return choose({ row: rows[0], bar: rows[0].list[0] });
    const { row, bar } = chosen, at = row.list.indexOf(bar);
    if (key === "ArrowLeft" || key === "ArrowRight") {
      return choose({ row, bar: row.list[Math.min(Math.max(at + (key === "ArrowRight" ? 1 : -1), 0), row.list.length - 1)] });
    }
    // Up and down stay at one time: to bars, or to a sum or wait at the same time.
    const onward = key === "ArrowDown" ? rows.slice(rows.indexOf(row) + 1) : rows.slice(0, rows.indexOf(row)).reverse();
    const meets = (each) => each.at(-2) < bar.at(-1) && each.at(-1) > bar.at(-2);
    const next = onward.find((each) => each.what === "bars" || each.list.some(meets)) ?? row;
    const middle = (bar.at(-2) + bar.at(-1)) / 2, far = (each) => Math.abs((each.at(-2) + each.at(-1)) / 2 - middle);
    return choose({ row: next, bar: next.list.reduce((best, each) => (far(each) < far(best) ? each : best), next.list[0]) });
  }
  timeline.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const does = { "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1 / 0.6), 0: () => look(0, data.ticks), Escape: () => choose(null) };
    if (event.key.startsWith("Arrow")) move(event.key);
    else if (does[event.key]) does[event.key]();
    else return;
    event.preventDefault();
  });
  timeline.addEventListener("pointerdown", (event) => {
    drag = { left: event.clientX, from: view.from, to: view.to, moved: false };
    timeline.setPointerCapture(event.pointerId);
  });
  timeline.addEventListener("pointermove", (event) => {
    if (drag && (drag.moved || Math.abs(event.clientX - drag.left) > 4)) {
      drag.moved = true;
      const by = ((event.clientX - drag.left) / (pageWidth - gutter)) * (drag.to - drag.from);
      look(drag.from - by, drag.to - by);
      return;
    }
    const item = hit(event.offsetX, event.offsetY);
    if (item?.bar !== hovered?.bar) { hovered = item; redraw(); }
    show(item, event.clientX, event.clientY);
  });
  timeline.addEventListener("pointerup", (event) => {
    if (drag && !drag.moved) { choose(hit(event.offsetX, event.offsetY)); show(chosen, event.clientX, event.clientY); }
    drag = null;
  });
  for (const name of ["pointerleave", "pointercancel"]) timeline.addEventListener(name, () => { drag = hovered = null; show(null); redraw(); });
  timeline.addEventListener("wheel", (event) => {
    if (event.ctrlKey || event.metaKey) zoom(Math.exp(event.deltaY * 0.004), tickAt(event.offsetX));
    else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      const by = (event.deltaX / pageWidth) * (view.to - view.from);
      look(view.from + by, view.to + by);
    } else return;
    event.preventDefault();
  }, { passive: false });
  for (const tool of document.querySelectorAll("[data-do]")) {
    const what = tool.dataset.do;
    if (tool.type === "checkbox") {
      tool.checked = options[what];
      tool.addEventListener("change", () => { options[what] = tool.checked; redraw(); });
    } else tool.addEventListener("click", () => (what === "all" ? look(0, data.ticks) : zoom(what === "in" ? 0.6 : 1 / 0.6)));
  }

  // ---- legend ---------------------------------------------------------------------------------------------------
  function legend() {
    const used = new Set(data.tracks.flatMap((track) => track.runs.flatMap((run) => run.bars.map((bar) => data.kinds[bar[0]]))));
    const entries = ["F", "B", "I", "W", "R"].filter((kind) => used.has(kind)).map((kind) => {
      const stops = [0, 1, 2].map((number) => `${fill(kind, number)} ${number * 33.4}% ${(number + 1) * 33.4}%`).join(", ");
      const lines = kind === "W" || kind === "R" ? `repeating-linear-gradient(135deg, transparent 0 3px, ${colour("card")} 3px 4.5px), ` : "";
      return [`${lines}linear-gradient(90deg, ${stops})`, `${KINDS[kind]} (${kind})`];
    });
    entries.push([colour("other"), "optimizer; below a bar: gradients being summed"]);
    if (isMeasured) {
      if (!data.isTogether) entries.unshift(["none", RUNS.map((name, number) => `${TAGS[number]} ${name}`).join(", ")]);
      entries.push([colour("wait"), "waiting"]);
    }
    if (data.tracks.some((track) => track.runs.some((run) => run.segments.length))) {
      entries.push([`linear-gradient(transparent 70%, ${colour("text")} 70%)`, "a segment, recomputed in the backward pass"]);
    }
    document.getElementById("legend").replaceChildren(...entries.map(([background, text]) => {
      const entry = document.createElement("span"), swatch = document.createElement("i");
      swatch.style.background = background;
      if (background !== "none") entry.append(swatch);
      entry.append(text);
      return entry;
    }));
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { style = getComputedStyle(document.documentElement); palette = {}; legend(); redraw(); });
  new ResizeObserver(redraw).observe(timeline);
  legend();
  drawTimeline();
  drawMemory();
})();
