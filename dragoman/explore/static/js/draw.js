// Drawing on canvas: matrices by a table of 256 colours, and line charts. Canvases are hidden from
// assistive technology; table.js has the same numbers.
import { onTheme } from './theme.js';

let drawColours = null;

onTheme(() => {
  drawColours = null;
});

const drawQueue = new Set();

// Run `paint` once, after every panel has changed its elements: reading a size or setting a canvas's font between
// two changes lays the whole page out each time.
export function paintLater(paint) {
  if (!drawQueue.size) {
    queueMicrotask(() => {
      try {
        for (const each of drawQueue) each(); // and what they add
      } finally {
        drawQueue.clear();
      }
    });
  }
  drawQueue.add(paint);
}

function drawResolve(names) {
  const probe = document.createElement('span');
  probe.className = 'colour-probe';
  document.body.append(probe);
  const colours = names.map((name) => {
    probe.style.color = `var(${name})`;
    return drawParse(getComputedStyle(probe).color);
  });
  probe.remove();
  return colours;
}

// "rgb(1, 2, 3)" and "color(srgb 0.1 0.2 0.3)" as [red, green, blue] of 0 to 255.
function drawParse(text) {
  const numbers = (text.match(/-?[\d.]+(?:e-?\d+)?/g) ?? ['0', '0', '0']).slice(0, 3).map(Number);
  return text.startsWith('color(') ? numbers.map((value) => value * 255) : numbers;
}

function drawRamp(stops, count) {
  return Array.from({ length: count }, (_, i) => {
    const at = (i / (count - 1)) * (stops.length - 1);
    const low = Math.min(Math.floor(at), stops.length - 2);
    return stops[low].map((value, c) => Math.round(value + (at - low) * (stops[low + 1][c] - value)));
  });
}

function drawPack(colours) {
  const table = new Uint32Array(colours.length);
  const bytes = new Uint8Array(table.buffer);
  colours.forEach((colour, i) => bytes.set([...colour, 255], 4 * i));
  return table;
}

function drawCss(colour) {
  return `rgb(${colour.map(Math.round).join(' ')})`;
}

// Colours of the theme in use: `heat` and `signed` are packed tables of 256, the rest CSS colours.
export function palette() {
  if (drawColours) return drawColours;
  const heat = drawResolve(['--heat-0', '--heat-1', '--heat-2', '--heat-3']);
  const negative = drawResolve(['--minus-3', '--minus-2', '--minus-1']);
  const positive = drawResolve(['--plus-1', '--plus-2', '--plus-3']);
  const [ink, soft, line, accent, surface, minus, plus] = drawResolve([
    '--draw-ink', '--draw-soft', '--draw-line', '--draw-accent', '--draw-surface', '--minus-2', '--plus-2',
  ]).map(drawCss);
  drawColours = {
    heat: drawPack(drawRamp(heat, 256)),
    signed: drawPack(drawRamp([...negative, heat[0], ...positive], 255).concat([positive[2]])),
    ink, soft, line, accent, surface, minus, plus,
    font: getComputedStyle(document.body).fontFamily,
  };
  return drawColours;
}

// Entry of the colour table: square root, so that small weights are seen; signed values from the middle.
export function colourIndex(value, scale, signed) {
  const root = Math.min(1, Math.sqrt(Math.abs(value) / (scale || 1)));
  if (signed) return 127 + Math.sign(value) * Math.round(127 * root);
  return Math.round(255 * root);
}

// Image of rows x cols values from `start`; blocks larger than `most` cells a side show their maximum.
export function cellImage(data, start, rows, cols, { scale = 1, signed = false, most = Infinity } = {}) {
  const colours = palette();
  const table = signed ? colours.signed : colours.heat;
  const height = Math.min(rows, most);
  const width = Math.min(cols, most);
  const image = new ImageData(Math.max(1, width), Math.max(1, height));
  const pixels = new Uint32Array(image.data.buffer);
  const factor = 1 / (scale || 1);
  if (!signed && height === rows && width === cols) {
    const count = rows * cols;
    for (let i = 0; i < count; i++) {
      const root = Math.sqrt(data[start + i] * factor);
      pixels[i] = table[root >= 1 ? 255 : (255 * root + 0.5) | 0];
    }
    return image;
  }
  const largest = new Float32Array(width * height);
  const columns = Uint32Array.from({ length: cols }, (_, c) => Math.floor((c * width) / cols));
  for (let r = 0, from = start; r < rows; r++, from += cols) {
    const row = Math.floor((r * height) / rows) * width;
    for (let c = 0; c < cols; c++) {
      const value = data[from + c];
      const most = largest[row + columns[c]];
      if (value > most ? value > -most : value < -most) largest[row + columns[c]] = value;
    }
  }
  for (let i = 0; i < largest.length; i++) pixels[i] = table[colourIndex(largest[i], scale, signed)];
  return image;
}

export function paintImage(canvas, image) {
  if (canvas.width !== image.width) canvas.width = image.width;
  if (canvas.height !== image.height) canvas.height = image.height;
  canvas.getContext('2d', { willReadFrequently: true }).putImageData(image, 0, 0);
}

// Size a canvas in CSS pixels and return its context, scaled to the device's pixels.
function drawContext(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.max(1, Math.round(width * ratio));
  canvas.height = Math.max(1, Math.round(height * ratio));
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext('2d');
  context.setTransform(canvas.width / width, 0, 0, canvas.height / height, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

function drawFont(context, size, weight = 400) {
  context.font = `${weight} ${size}px ${palette().font}`;
}

const DRAW_ANGLE = (-52 * Math.PI) / 180;
const DRAW_SIZE = 12;

function drawWidest(context, labels, most) {
  let widest = 0;
  for (const label of labels) widest = Math.max(widest, context.measureText(label).width);
  return Math.min(most, widest);
}

// Space for the labels and the size of a cell for a matrix of labels in `width` CSS pixels.
export function matrixLayout(canvas, rowLabels, colLabels, width, { least = 8, largest = 26 } = {}) {
  const context = canvas.getContext('2d');
  drawFont(context, DRAW_SIZE, 700);
  const narrow = width < 420;
  const left = Math.ceil(drawWidest(context, rowLabels, narrow ? 76 : 120)) + 10;
  const slanted = drawWidest(context, colLabels, narrow ? 76 : 104);
  const top = Math.ceil(slanted * Math.sin(-DRAW_ANGLE)) + 16;
  const right = Math.ceil(slanted * Math.cos(DRAW_ANGLE)) + 12;
  const room = (width - left - right) / Math.max(1, colLabels.length);
  const cell = Math.max(least, Math.min(largest, Math.floor(room)));
  return {
    left, top, right, cell, slanted,
    width: left + cell * colLabels.length + right,
    height: top + cell * rowLabels.length + 2,
  };
}

function drawClipped(context, text, x, y, most) {
  let shown = text;
  if (context.measureText(shown).width > most + 1) {
    const clusters = [...new Intl.Segmenter().segment(text)].map((each) => each.segment);
    while (clusters.length > 1 && context.measureText(`${clusters.join('')}…`).width > most) clusters.pop();
    shown = `${clusters.join('')}…`;
  }
  context.fillText(shown, x, y);
}

// Draw the visible part of a matrix with its labels. `view`: layout (of matrixLayout), image (a canvas with one
// pixel a cell), rowLabels, colLabels, width, height, scrollX, scrollY, row, col (cursor or -1), colEdges
// (borders between segments, in cells), pooled (whether a cell is a group and gets a border),
// path (a column to mark in each row, or null).
export function drawMatrix(canvas, view) {
  const { left, top, cell, slanted } = view.layout;
  const colours = palette();
  const context = drawContext(canvas, view.width, view.height);
  const x0 = left - view.scrollX;
  const y0 = top - view.scrollY;
  const rows = view.rowLabels.length;
  const cols = view.colLabels.length;
  const wide = cols * cell;
  const high = rows * cell;
  context.save();
  context.beginPath();
  context.rect(left, top, view.width - left, view.height - top);
  context.clip();
  context.imageSmoothingEnabled = false;
  context.drawImage(view.image, x0, y0, wide, high);
  context.fillStyle = view.pooled ? colours.line : colours.surface;
  if (cell >= 12 || view.pooled) {
    for (let r = 1; r < rows; r++) context.fillRect(x0, y0 + r * cell - 0.5, wide, 1);
    for (let c = 1; c < cols; c++) context.fillRect(x0 + c * cell - 0.5, y0, 1, high);
  }
  context.fillStyle = colours.soft;
  for (const edge of view.colEdges ?? []) context.fillRect(x0 + edge * cell - 1, y0, 2, high);
  context.strokeStyle = colours.line;
  context.lineWidth = 1;
  context.strokeRect(x0 - 0.5, y0 - 0.5, wide + 1, high + 1);
  context.strokeStyle = colours.accent;
  context.lineWidth = 2;
  (view.path ?? []).forEach((c, r) => {
    if (c >= 0) context.strokeRect(x0 + c * cell + 2, y0 + r * cell + 2, cell - 4, cell - 4);
  });
  context.lineWidth = 1;
  if (view.row >= 0) context.strokeRect(x0 - 0.5, y0 + view.row * cell - 0.5, wide + 1, cell + 1);
  if (view.col >= 0) context.strokeRect(x0 + view.col * cell - 0.5, y0 - 0.5, cell + 1, high + 1);
  if (view.row >= 0 && view.col >= 0) {
    context.lineWidth = 2;
    context.strokeStyle = colours.surface;
    context.strokeRect(x0 + view.col * cell + 1, y0 + view.row * cell + 1, cell - 2, cell - 2);
    context.strokeStyle = colours.accent;
    context.strokeRect(x0 + view.col * cell - 1, y0 + view.row * cell - 1, cell + 2, cell + 2);
  }
  context.restore();
  drawFont(context, DRAW_SIZE);
  context.textBaseline = 'middle';
  const every = Math.max(1, Math.ceil(14 / cell));
  context.save();
  context.beginPath();
  context.rect(0, top - 2, left, view.height - top + 2);
  context.clip();
  context.textAlign = 'right';
  drawAxis(context, view.rowLabels, view.row, every, (r, label) => {
    drawClipped(context, label, left - 7, y0 + (r + 0.5) * cell, left - 9);
  });
  context.restore();
  context.save();
  context.beginPath();
  context.rect(left - 2, 0, view.width - left + 2, top);
  context.clip();
  context.textAlign = 'left';
  drawAxis(context, view.colLabels, view.col, every, (c, label) => {
    context.save();
    context.translate(x0 + (c + 0.5) * cell + 1, top - 6);
    context.rotate(DRAW_ANGLE);
    drawClipped(context, label, 0, 0, slanted);
    context.restore();
  });
  context.restore();
}

// Every n-th label, and always the chosen one, which replaces those that it would overlap.
function drawAxis(context, labels, chosen, every, put) {
  const colours = palette();
  drawFont(context, DRAW_SIZE);
  context.fillStyle = colours.ink;
  for (let i = 0; i < labels.length; i += every) {
    if (chosen < 0 || Math.abs(i - chosen) >= every) put(i, labels[i]);
  }
  if (chosen < 0) return;
  drawFont(context, DRAW_SIZE, 700);
  context.fillStyle = colours.accent;
  put(chosen, labels[chosen]);
}

// A line chart. `chart`: series [{points: [[x, y]], accent, dots}], x and y ranges, xTicks and yTicks
// [[value, label]]; `y` may be given downwards ([high, low]) and `log` takes logarithms of y.
export function drawChart(canvas, { width, height, series, x, y, xTicks, yTicks, log = false }) {
  const colours = palette();
  const context = drawContext(canvas, width, height);
  drawFont(context, DRAW_SIZE);
  const left = Math.ceil(drawWidest(context, yTicks.map((tick) => tick[1]), 80)) + 12;
  const inner = { left, top: 10, width: width - left - 12, height: height - 10 - 26 };
  const scale = (value) => (log ? Math.log10(Math.max(value, 1)) : value);
  const part = (value, [low, high]) => (high === low ? 0.5 : (value - low) / (high - low));
  const px = (value) => inner.left + inner.width * part(value, x);
  const py = (value) => inner.top + inner.height * (1 - part(scale(value), y.map(scale)));
  context.lineWidth = 1;
  context.textBaseline = 'middle';
  context.textAlign = 'right';
  for (const [value, label] of yTicks) {
    context.strokeStyle = colours.line;
    context.beginPath();
    context.moveTo(inner.left, Math.round(py(value)) + 0.5);
    context.lineTo(inner.left + inner.width, Math.round(py(value)) + 0.5);
    context.stroke();
    context.fillStyle = colours.ink;
    context.fillText(label, inner.left - 8, py(value));
  }
  context.textAlign = 'center';
  context.textBaseline = 'alphabetic';
  let taken = -Infinity;
  for (const [value, label] of xTicks) {
    const half = context.measureText(label).width / 2;
    const at = Math.min(px(value), width - half);
    if (at - half < taken + 6) continue;
    taken = at + half;
    context.fillText(label, at, height - 6);
  }
  for (const each of series) {
    context.strokeStyle = each.accent ? colours.accent : colours.soft;
    context.fillStyle = context.strokeStyle;
    context.lineWidth = each.accent ? 2.5 : 1;
    context.lineJoin = 'round';
    context.beginPath();
    each.points.forEach(([a, b], i) => context[i ? 'lineTo' : 'moveTo'](px(a), py(b)));
    context.stroke();
    if (!each.dots) continue;
    for (const [a, b] of each.points) {
      context.beginPath();
      context.arc(px(a), py(b), 4, 0, 2 * Math.PI);
      context.fill();
    }
  }
}
