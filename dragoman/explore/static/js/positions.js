// How order enters the model: similarity of positions, curves per head, reach, and how far each head attends.
import { element } from './dom.js';
import { cellImage, drawChart, drawMatrix, matrixLayout, paintImage, paintLater } from './draw.js';
import { groupTitle } from './grid.js';
import { addStrings, formatNumber, hasString, translate } from './i18n.js';
import { headName } from './state.js';
import { dataTable, matrixTable, scrollRegion, tableToggle } from './table.js';
import { onTheme } from './theme.js';

const POSITIONS_TABLE = 64;

export function mountPositions(root, { store, current, onExplanation }) {
  const canvas = element('canvas', { class: 'matrix-canvas', 'aria-hidden': 'true' });
  const curveCanvas = element('canvas', { class: 'chart', 'aria-hidden': 'true' });
  const distanceCanvas = element('canvas', { class: 'chart', 'aria-hidden': 'true' });
  const mapBox = element('div', { class: 'chart-box' }, canvas);
  const curveBox = element('div', { class: 'chart-box' }, curveCanvas);
  const distanceBox = element('div', { class: 'chart-box' }, distanceCanvas);
  const image = document.createElement('canvas');
  const widths = new Map();

  function similarity(ex) {
    const tensor = ex.tensor(ex.positions?.tensor);
    return tensor && tensor.shape.length === 2 ? tensor : null;
  }

  function paintMap(ex) {
    const tensor = similarity(ex);
    const width = widths.get(mapBox);
    if (!tensor || !width) return;
    const [rows, cols] = tensor.shape;
    let most = 0;
    let low = 0;
    for (const value of tensor.data) {
      most = Math.max(most, Math.abs(value));
      low = Math.min(low, value);
    }
    paintImage(image, cellImage(tensor.data, 0, rows, cols, { scale: most || 1, signed: low < 0, most: 256 }));
    const labels = (count) => Array.from({ length: count }, (_, i) => String(i));
    const layout = { ...matrixLayout(canvas, labels(rows), labels(cols), width, { least: 0.5, largest: 14 }) };
    layout.cell = Math.min(14, Math.max(1, (Math.min(width, 420) - layout.left - layout.right) / cols));
    drawMatrix(canvas, {
      layout, image, rowLabels: labels(rows), colLabels: labels(cols), row: -1, col: -1, scrollX: 0, scrollY: 0,
      width: Math.min(width, layout.left + layout.cell * cols + layout.right), height: layout.top + layout.cell * rows + 2,
    });
  }

  function paintCurves(ex) {
    const curves = ex.positions?.curves ?? [];
    const width = widths.get(curveBox);
    if (!curves.length || !width) return;
    const { site, head } = store.get();
    const xs = curves.flatMap((curve) => curve.x);
    const ys = curves.flatMap((curve) => curve.y);
    const [x0, x1, y0, y1] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
    const chosen = curves.some((curve) => curve.site === site && curve.head === head);
    const middle = (a, b) => [a, (a + b) / 2, b];
    drawChart(curveCanvas, {
      width, height: 220, x: [x0, x1], y: [y0, y1],
      series: curves.map((curve, i) => ({
        points: curve.x.map((x, j) => [x, curve.y[j]]),
        accent: chosen ? curve.site === site && curve.head === head : i === 0 && curves.length === 1,
      })).sort((a, b) => Number(a.accent) - Number(b.accent)),
      xTicks: middle(x0, x1).map((x) => [x, formatNumber(x, 0)]),
      yTicks: middle(y0, y1).map((y) => [y, formatNumber(y, 2)]),
    });
  }

  function distances(ex) {
    return (ex.heads ?? []).filter((head) => typeof head.distance === 'number' && ex.site(head.site));
  }

  // One dot for every head: layers to the right, mean distance upwards.
  function paintDistances(ex) {
    const heads = distances(ex);
    const width = widths.get(distanceBox);
    if (!heads.length || !width) return;
    const sites = [...new Set(heads.map((head) => head.site))];
    const most = Math.max(1, ...heads.map((head) => head.distance));
    const { site, head } = store.get();
    const isChosen = (each) => each.site === site && each.head === head;
    const point = (each) => [sites.indexOf(each.site), each.distance];
    const step = most > 20 ? 10 : most > 8 ? 4 : most > 4 ? 2 : 1;
    drawChart(distanceCanvas, {
      width, height: 200, x: [-0.5, sites.length - 0.5], y: [0, most * 1.05],
      series: [...heads].sort((a, b) => Number(isChosen(a)) - Number(isChosen(b)))
        .map((each) => ({ points: [point(each)], dots: true, accent: isChosen(each) })),
      xTicks: sites.map((each, i) => [i, each]),
      yTicks: Array.from({ length: Math.floor(most / step) + 1 }, (_, i) => [i * step, String(i * step)]),
    });
  }

  function paintHeads() {
    const ex = current();
    if (!ex) return;
    paintCurves(ex);
    paintDistances(ex);
  }

  function paint() {
    if (current()) paintMap(current());
    paintHeads();
  }

  function show(ex) {
    const positions = ex.positions ?? {};
    const kind = `positions.kind.${positions.kind}`;
    const lead = hasString(kind) ? translate(kind) : String(positions.kind ?? '');
    const parts = [element('p', { class: 'lead' }, lead)];
    const note = [positions.note === lead ? '' : positions.note, typeof positions.reach === 'number' ? translate('positions.reach', { reach: positions.reach }) : '']
      .filter(Boolean).join(' ');
    if (note) parts.push(element('p', { class: 'quiet' }, note));
    const blocks = [];
    const tensor = similarity(ex);
    if (tensor) {
      const [rows, cols] = tensor.shape;
      const most = Math.min(POSITIONS_TABLE, rows, cols);
      const table = tableToggle(translate('positions.similarity'), () => matrixTable({
        caption: translate('positions.similarityCaption', { count: most }),
        corner: translate('positions.position'),
        rowLabels: Array.from({ length: Math.min(most, rows) }, (_, i) => String(i)),
        colLabels: Array.from({ length: Math.min(most, cols) }, (_, i) => String(i)),
        value: (r, c) => tensor.data[r * cols + c],
      }));
      blocks.push(element('div', {}, element('h3', {}, translate('positions.similarity')), mapBox,
        element('div', { class: 'controls below' }, table.button), table.host));
    }
    if (positions.curves?.length) {
      const table = tableToggle(translate('positions.curves'), () => dataTable({
        caption: translate('positions.curves'),
        columns: [{ title: translate('positions.offset') }, ...positions.curves.map((curve) => ({ title: headName(curve.site, curve.head), number: true }))],
        // A causal layer has no curve for keys after the query.
        rows: [...new Set(positions.curves.flatMap((curve) => curve.x))].sort((a, b) => a - b)
          .map((x) => [formatNumber(x, 0), ...positions.curves.map((curve) => formatNumber(curve.y[curve.x.indexOf(x)], 3))]),
      }));
      blocks.push(element('div', {}, element('h3', {}, translate('positions.curves')), curveBox,
        element('p', { class: 'quiet' }, translate('positions.curvesNote')),
        element('div', { class: 'controls below' }, table.button), table.host));
    }
    const heads = distances(ex);
    if (heads.length) {
      const table = tableToggle(translate('positions.distance'), () => dataTable({
        caption: translate('positions.distance'),
        columns: [{ title: translate('heads.column.head') }, { title: translate('positions.group') }, { title: translate('heads.column.distance'), number: true }],
        rows: heads.map((head) => [headName(head.site, head.head), groupTitle(ex.site(head.site).group), formatNumber(head.distance, 2)]),
      }));
      blocks.push(element('div', {}, element('h3', {}, translate('positions.distance')), distanceBox,
        element('p', { class: 'quiet' }, translate('positions.distanceNote')),
        element('div', { class: 'controls below' }, table.button), table.host));
    }
    root.replaceChildren(...parts, element('div', { class: 'halves' }, blocks));
    paint();
  }

  const watcher = new ResizeObserver((entries) => {
    for (const entry of entries) widths.set(entry.target, entry.contentRect.width);
    paint();
  });
  for (const box of [mapBox, curveBox, distanceBox]) watcher.observe(box);
  root.dataset.widget = 'positions';
  onExplanation(show);
  store.subscribe((state, changed) => {
    if (changed.has('site') || changed.has('head')) paintLater(paintHeads);
  });
  onTheme(paint);
}

addStrings(
  {
    'positions.kind.sinusoidal': 'Sines and cosines of the position are added to the embeddings.',
    'positions.kind.learned': 'A learned vector for every position is added to the embeddings.',
    'positions.kind.relative': 'A bias for the distance between two tokens is added to the attention scores.',
    'positions.kind.rotary': 'Queries and keys are rotated by an angle that grows with the position.',
    'positions.kind.convolution': 'Order enters through convolutions over a window of adjacent tokens.',
    'positions.kind.recurrent': 'Order enters through the recurrence: tokens are read one after the other.',
    'positions.kind.none': 'This model has no position information of its own.',
    'positions.reach': 'Each position sees {reach} tokens to a side.',
    'positions.position': 'Position',
    'positions.similarity': 'Similarity of positions',
    'positions.similarityCaption': 'Similarity of the first {count} positions',
    'positions.curves': 'Score by distance, for each head',
    'positions.curvesNote': 'To the right: the key is after the query. The selected head is drawn heavy.',
    'positions.offset': 'Distance',
    'positions.distance': 'Mean attention distance of each head',
    'positions.distanceNote': 'One dot a head, layer by layer: how many tokens away it reads on average. The selected head is highlighted.',
    'positions.group': 'Group',
  },
  {
    'positions.kind.sinusoidal': '位置的正弦和余弦加到词嵌入上。',
    'positions.kind.learned': '每个位置有一个学得的向量，加到词嵌入上。',
    'positions.kind.relative': '两个词元之间的距离对应一个偏置，加到注意力分数上。',
    'positions.kind.rotary': '查询和键按随位置增大的角度旋转。',
    'positions.kind.convolution': '顺序通过卷积进入：每个位置看到一个窗口内的邻居。',
    'positions.kind.recurrent': '顺序通过循环进入：词元一个接一个地读入。',
    'positions.kind.none': '这个模型没有自己的位置信息。',
    'positions.reach': '每个位置向一侧看到 {reach} 个词元。',
    'positions.position': '位置',
    'positions.similarity': '位置之间的相似度',
    'positions.similarityCaption': '前 {count} 个位置的相似度',
    'positions.curves': '每个头：分数随距离的变化',
    'positions.curvesNote': '向右：键在查询之后。选中的头用粗线。',
    'positions.offset': '距离',
    'positions.distance': '每个头的平均注意距离',
    'positions.distanceNote': '每个点是一个头，按层排列：平均读取多远的词元。选中的头突出显示。',
    'positions.group': '组',
  },
);
