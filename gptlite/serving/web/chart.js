// Curves of losses over steps, on a canvas.

const MARGIN = { left: 56, right: 24, top: 12, bottom: 34 };

/** Ticks from `low` to `high`: round numbers, or with `log` powers of ten and their parts. */
export function ticks(low, high, log, most) {
  if (!(high > low)) return [low];
  if (log) {
    const found = [];
    for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); e++) {
      for (const m of [1, 2, 5]) found.push(m * 10 ** e);
    }
    const inside = found.filter((t) => t >= low && t <= high);
    if (inside.length > 1) return inside.filter((t) => inside.length <= most || /^1/.test(t.toExponential()));
  }
  const rough = (high - low) / most;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough);
  const first = Math.ceil(low / step);
  return Array.from({ length: Math.floor(high / step) - first + 1 }, (_, k) => (first + k) * step);
}

const short = (t) =>
  Math.abs(t) >= 1e6 ? `${+(t / 1e6).toPrecision(4)} M` : Math.abs(t) >= 1e4 ? `${+(t / 1e3).toPrecision(4)} k` : `${+t.toPrecision(4)}`;

/** Draws `curves`, each `{ color, dashed, points: [steps, losses] }`. `logX`, `logY`: the axes. */
export function draw(canvas, curves, { logX, logY }) {
  const style = getComputedStyle(canvas);
  const ratio = devicePixelRatio || 1;
  const width = canvas.clientWidth;
  const height = canvas.clientHeight;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  context.font = `12px ${style.fontFamily}`;
  const ink = style.getPropertyValue("--soft");
  const line = style.getPropertyValue("--line");

  const usable = (x, y) => !(logX && x <= 0) && !(logY && y <= 0);
  const box = { x: [Infinity, -Infinity], y: [Infinity, -Infinity] };
  const widen = (range, v) => {
    if (v < range[0]) range[0] = v;
    if (v > range[1]) range[1] = v;
  };
  for (const { points: [xs, ys] } of curves) {
    for (let i = 0; i < xs.length; i++) {
      if (!usable(xs[i], ys[i])) continue;
      widen(box.x, xs[i]);
      widen(box.y, ys[i]);
    }
  }
  if (box.x[0] === Infinity) return;
  if (!logX) box.x[0] = 0;
  const axis = ([low, high], log, from, to) => {
    const f = log ? Math.log : (v) => v;
    const span = f(high) - f(low) || 1;
    return (v) => from + ((f(v) - f(low)) / span) * (to - from);
  };
  const x = axis(box.x, logX, MARGIN.left, width - MARGIN.right);
  const y = axis(box.y, logY, height - MARGIN.bottom, MARGIN.top);

  context.fillStyle = ink;
  context.strokeStyle = line;
  context.textAlign = "right";
  context.textBaseline = "middle";
  for (const t of ticks(...box.y, logY, 6)) {
    stroke(context, [MARGIN.left, width - MARGIN.right], [y(t), y(t)]);
    context.fillText(short(t), MARGIN.left - 6, y(t));
  }
  context.textAlign = "center";
  context.textBaseline = "top";
  for (const t of ticks(...box.x, logX, Math.max(2, Math.floor(width / 120)))) {
    stroke(context, [x(t), x(t)], [MARGIN.top, height - MARGIN.bottom]);
    context.fillText(short(t), x(t), height - MARGIN.bottom + 5);
  }
  context.fillText("step", width / 2, height - 14);

  for (const { color, dashed, points: [xs, ys] } of curves) {
    context.strokeStyle = color;
    context.lineWidth = dashed ? 2 : 1.3;
    context.setLineDash(dashed ? [6, 3] : []);
    context.beginPath();
    let begun = false;
    for (let i = 0; i < xs.length; i++) {
      if (!usable(xs[i], ys[i])) continue;
      if (begun) context.lineTo(x(xs[i]), y(ys[i]));
      else context.moveTo(x(xs[i]), y(ys[i]));
      begun = true;
    }
    context.stroke();
    if (xs.length === 1 && begun) {
      context.fillStyle = color;
      context.fillRect(x(xs[0]) - 3, y(ys[0]) - 3, 6, 6);
    }
  }
  context.setLineDash([]);
}

function stroke(context, [x0, x1], [y0, y1]) {
  context.beginPath();
  context.moveTo(x0, y0);
  context.lineTo(x1, y1);
  context.stroke();
}
