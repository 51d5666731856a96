// Drawing on canvas: matrices by a table of 256 colours, and line charts. Canvases are hidden from
// assistive technology; table.js has the same numbers.
import { clamp } from './parts.js';
import { graphemes } from './text.js';
import { onTheme, themeColor } from './theme.js';

const DRAW_ANGLE = (-52 * Math.PI) / 180;
const drawQueue = new Set();
let drawColours = null;

onTheme(() => {
  drawColours = null;
});

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
  drawQueue.delete(paint); // at the end, even if it waits already or has just run: what comes before may change its layout
  drawQueue.add(paint);
}

// `count` colours from the first CSS colour to the last, packed for pixels.
function drawRamp(colours, count) {
  const stops = colours.map((colour) => {
    const numbers = colour.match(/-?[\d.]+(?:e-?\d+)?/g).slice(0, 3); // of "rgb(1, 2, 3)" or "color(srgb 0.1 0.2 0.3)"
    return numbers.map((number) => number * (colour.startsWith('color(') ? 255 : 1));
  });
  const table = new Uint32Array(count);
  const bytes = new Uint8Array(table.buffer).fill(255);
  for (let i = 0; i < count; i++) {
    const at = (i / (count - 1)) * (stops.length - 1);
    const low = Math.min(Math.floor(at), stops.length - 2);
    bytes.set(stops[low].map((value, c) => Math.round(value + (at - low) * (stops[low + 1][c] - value))), 4 * i);
  }
  return table;
}

// Colours of the theme in use: `heat` and `signed` are tables for pixels, the rest CSS colours.
function palette() {
  if (drawColours) return drawColours;
  const heat = [0, 1, 2, 3].map((i) => themeColor(`heat-${i}`));
  drawColours = {
    heat: drawRamp(heat, 256),
    signed: drawRamp([...[3, 2, 1].map((i) => themeColor(`minus-${i}`)), ...heat], 255),
    font: getComputedStyle(document.body).fontFamily,
  };
  for (const name of ['ink', 'edge', 'line', 'accent', 'panel']) drawColours[name] = themeColor(`draw-${name}`);
  return drawColours;
}

// Colours of rows x cols values from `start`, each as a number in the table `heat` or `signed`: {codes, width, height}.
// At most `most` a side: then each is the largest of a block.
function cellCodes(data, start, rows, cols, { scale = 1, signed = false, most = Infinity }) {
  const [height, width] = [rows, cols].map((count) => clamp(count, 1, most));
  const codes = new Float32Array(width * height);
  const columns = Uint32Array.from({ length: cols }, (_, c) => Math.floor((c * width) / cols));
  for (let r = 0; r < rows; r++) {
    const row = Math.floor((r * height) / rows) * width;
    for (let c = 0; c < cols; c++) {
      const at = row + columns[c];
      const value = data[start + r * cols + c];
      if (Math.abs(value) > Math.abs(codes[at])) codes[at] = value;
    }
  }
  // By the square root, so that small weights are seen; signed values from the middle.
  for (let i = 0; i < codes.length; i++) {
    const root = Math.min(1, Math.sqrt(Math.abs(codes[i]) / scale));
    codes[i] = signed ? 127 + Math.sign(codes[i]) * Math.round(127 * root) : Math.round(255 * root);
  }
  return { codes, width, height };
}

export function cellImage(data, start, rows, cols, options = {}) {
  const table = palette()[options.signed ? 'signed' : 'heat'];
  const { codes, width, height } = cellCodes(data, start, rows, cols, options);
  const image = new ImageData(width, height);
  new Uint32Array(image.data.buffer).set(Uint32Array.from(codes, (code) => table[code]));
  return image;
}

// Small maps of one size, `across` in each row of one picture: the browser takes longer to show a canvas of its own for
// each than to paint all of them.
export function tilePicture(count, side, across) {
  const width = side * across;
  const height = side * Math.ceil(count / across);
  const file = new Uint8Array(1078 + width * height); // a bitmap of 256 colours: headers, colours, pixels
  const head = new DataView(file.buffer);
  head.setUint16(0, 0x424d);
  [[10, 1078], [14, 40], [18, width], [22, -height], [26, 0x80001]].forEach(([at, value]) => head.setInt32(at, value, true));
  return {
    // Draw the values of a head as tile `index`.
    paint(index, data, start, rows, cols, scale) {
      const small = cellCodes(data, start, rows, cols, { scale, most: side });
      const columns = Uint8Array.from({ length: side }, (_, x) => Math.floor((x * small.width) / side));
      let at = 1078 + Math.floor(index / across) * side * width + (index % across) * side;
      for (let y = 0; y < side; y++, at += width) {
        const row = Math.floor((y * small.height) / side) * small.width;
        for (let x = 0; x < side; x++) file[at + x] = small.codes[row + columns[x]];
      }
    },
    // The picture as an address.
    address() {
      palette().heat.forEach((colour, i) => head.setUint32(54 + 4 * i, colour << 8));
      return `data:image/bmp;base64,${file.toBase64?.() ?? btoa(file.reduce((text, byte) => text + String.fromCharCode(byte), ''))}`;
    },
  };
}

export function paintImage(canvas, image) {
  const { width, height } = image;
  if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
  canvas.getContext('2d', { willReadFrequently: true }).putImageData(image, 0, 0);
}

// Size a canvas in CSS pixels, which clears it, and return its context, scaled to the device's pixels.
function drawContext(canvas, width, height) {
  const sizes = [width, height].map((size) => Math.max(1, Math.round(size * devicePixelRatio)));
  [canvas.width, canvas.height] = sizes;
  Object.assign(canvas.style, { width: `${width}px`, height: `${height}px` });
  const context = canvas.getContext('2d');
  context.scale(sizes[0] / width, sizes[1] / height);
  return drawFont(context);
}

function drawFont(context, weight = 400) {
  context.font = `${weight} 12px ${palette().font}`;
  return context;
}

const drawWidest = (context, labels, most) => clamp(Math.max(...labels.map((label) => context.measureText(label).width)), 0, most);

// Space for the labels and the size of a cell for a matrix of labels in `width` CSS pixels.
export function matrixLayout(canvas, rowLabels, colLabels, width) {
  const context = drawFont(canvas.getContext('2d'), 700);
  const isNarrow = width < 420;
  const left = Math.ceil(drawWidest(context, rowLabels, isNarrow ? 76 : 120)) + 10;
  const slanted = drawWidest(context, colLabels, isNarrow ? 76 : 104);
  const top = Math.ceil(slanted * Math.sin(-DRAW_ANGLE)) + 16;
  const right = Math.ceil(slanted * Math.cos(DRAW_ANGLE)) + 12;
  const cell = clamp(Math.floor((width - left - right) / colLabels.length), 8, 26);
  return {
    left, top, right, cell, slanted,
    width: left + cell * colLabels.length + right,
    height: top + cell * rowLabels.length + 2,
  };
}

function drawShortened(context, text, most) {
  if (context.measureText(text).width <= most + 1) return text;
  const clusters = graphemes(text);
  const shown = () => `${clusters.join('')}…`;
  while (clusters.length > 1 && context.measureText(shown()).width > most) clusters.pop();
  return shown();
}

// Draw the visible part of a matrix with its labels. `view`: layout (of matrixLayout), image (a canvas with one pixel
// a cell), rowLabels, colLabels, width, height, scrollX, scrollY, row, col (cursor or -1); there may be colEdges
// (columns where segments begin), pooled (whether cells are groups and get a border), path (a column for each row).
export function drawMatrix(canvas, view) {
  const { layout: { left, top, cell, slanted }, width, height, rowLabels, colLabels, row, col, pooled } = view;
  const { ink, edge, line, accent, panel } = palette();
  const context = drawContext(canvas, width, height);
  const [x0, y0] = [left - view.scrollX, top - view.scrollY];
  const [rows, cols] = [rowLabels.length, colLabels.length];
  const within = (x, y, draw) => {
    context.save();
    context.beginPath();
    context.rect(x, y, x ? width : left, y ? height : top);
    context.clip();
    draw();
    context.restore();
  };
  const fill = (c, r, wide, high) => context.fillRect(x0 + c * cell - wide / 2, y0 + r * cell - high / 2, wide, high);
  // A line around some cells, `out` pixels outside of their border.
  const frame = (color, lineWidth, c, r, wide, high, out) => {
    Object.assign(context, { strokeStyle: color, lineWidth });
    context.strokeRect(x0 + c * cell - out, y0 + r * cell - out, wide * cell + 2 * out, high * cell + 2 * out);
  };
  within(left, top, () => {
    context.imageSmoothingEnabled = false;
    context.drawImage(view.image, x0, y0, cols * cell, rows * cell);
    context.fillStyle = pooled ? line : panel;
    if (cell >= 12 || pooled) {
      for (let r = 1; r < rows; r++) fill(cols / 2, r, cols * cell, 1);
      for (let c = 1; c < cols; c++) fill(c, rows / 2, 1, rows * cell);
    }
    context.fillStyle = edge;
    for (const c of view.colEdges ?? []) fill(c, rows / 2, 2, rows * cell);
    frame(line, 1, 0, 0, cols, rows, 0.5);
    view.path?.forEach((c, r) => c < cols && frame(accent, 2, c, r, 1, 1, -2));
    if (row >= 0) frame(accent, 1, 0, row, cols, 1, 0.5);
    if (col >= 0) frame(accent, 1, col, 0, 1, rows, 0.5);
    if (row >= 0 && col >= 0) {
      frame(panel, 2, col, row, 1, 1, -1);
      frame(accent, 2, col, row, 1, 1, 1);
    }
  });
  // Every n-th label, and always the chosen one, which replaces those that it would overlap.
  const every = Math.max(1, Math.ceil(14 / cell));
  const drawLabels = (labels, chosen, most, angle, place) => {
    const put = (i) => {
      context.save();
      context.translate(...place((i + 0.5) * cell));
      context.rotate(angle);
      context.fillText(drawShortened(context, labels[i], most), 0, 0);
      context.restore();
    };
    Object.assign(context, { fillStyle: ink, textBaseline: 'middle', textAlign: angle ? 'left' : 'right' });
    for (let i = 0; i < labels.length; i += every) if (chosen < 0 || Math.abs(i - chosen) >= every) put(i);
    drawFont(context, 700).fillStyle = accent;
    if (chosen >= 0) put(chosen);
  };
  within(0, top - 2, () => drawLabels(rowLabels, row, left - 9, 0, (at) => [left - 7, y0 + at]));
  within(left - 2, 0, () => drawLabels(colLabels, col, slanted, DRAW_ANGLE, (at) => [x0 + at + 1, top - 6]));
}

// A line chart. `chart`: series [{points: [[x, y]], accent, dots}], x and y ranges, xTicks and yTicks
// [[value, label]]; `y` may be given downwards ([high, low]) and `log` takes logarithms of y.
export function drawChart(canvas, { width, height, series, x, y, xTicks, yTicks, log }) {
  const { ink, edge, line, accent } = palette();
  const context = drawContext(canvas, width, height);
  const left = Math.ceil(drawWidest(context, yTicks.map((tick) => tick[1]), 80)) + 12;
  const right = width - 12;
  const scale = (value) => (log ? Math.log10(Math.max(value, 1)) : value);
  const part = (value, [low, high]) => (high === low ? 0.5 : (value - low) / (high - low));
  const px = (value) => left + (right - left) * part(value, x);
  const py = (value) => 10 + (height - 36) * (1 - part(scale(value), y.map(scale)));
  Object.assign(context, { fillStyle: ink, textBaseline: 'middle', textAlign: 'right' });
  const stroke = (points, color, lineWidth) => {
    Object.assign(context, { strokeStyle: color, lineWidth, lineJoin: 'round' });
    context.beginPath();
    for (const point of points) context.lineTo(...point);
    context.stroke();
  };
  for (const [value, label] of yTicks) {
    const at = Math.round(py(value)) + 0.5;
    stroke([[left, at], [right, at]], line, 1);
    context.fillText(label, left - 8, py(value));
  }
  Object.assign(context, { textBaseline: 'alphabetic', textAlign: 'center' });
  let taken = -Infinity;
  for (const [value, label] of xTicks) {
    const half = context.measureText(label).width / 2;
    const at = Math.min(px(value), width - half);
    if (at - half < taken + 6) continue;
    taken = at + half;
    context.fillText(label, at, height - 6);
  }
  for (const each of series) {
    const points = each.points.map(([a, b]) => [px(a), py(b)]);
    context.fillStyle = each.accent ? accent : edge;
    stroke(points, context.fillStyle, each.accent ? 2.5 : 1);
    for (const point of each.dots ? points : []) {
      context.beginPath();
      context.arc(...point, 4, 0, 2 * Math.PI);
      context.fill();
    }
  }
}
