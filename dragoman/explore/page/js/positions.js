// How order enters the model: similarity of positions, curves per head, reach, and how far each head attends.
import { make, setChildren } from './dom.js';
import { cellImage, drawChart, drawMatrix, matrixLayout, paintImage, paintLater } from './draw.js';
import { groupTitle, siteGroup } from './grid.js';
import { addTexts, currentLanguage, formatNumber, translate } from './i18n.js';
import { clamp, joinTexts, makeChart } from './parts.js';
import { headName } from './state.js';
import { dataTable, matrixTable, tableToggle } from './table.js';

const positionsText = addTexts('positions', {
  title: ['Word order', '词序'],
  purpose: ['How this model knows which word comes first, and how far its heads reach.', '模型怎样知道词的先后，它的头能看多远。'],
  'kind.sinusoidal': '位置的正弦和余弦加到词嵌入上。',
  'kind.learned': '每个位置有一个学得的向量，加到词嵌入上。',
  'kind.relative': '两个词元之间的距离对应一个偏置，加到注意力分数上。',
  'kind.rotary': '查询和键按随位置增大的角度旋转。',
  'kind.convolution': '卷积读取一个窗口内的相邻词元。',
  'kind.recurrent': '循环网络一个接一个地读入词元。',
  'kind.none': '这个模型没有自己的位置信息。',
  reach: '每个位置向一侧看到 {reach} 个词元。',
  position: ['Position', '位置'],
  similarity: ['Similarity of positions', '位置之间的相似度'],
  similarityCaption: ['Similarity of the first {count} positions', '前 {count} 个位置的相似度'],
  curves: ['Score by distance, for each head', '每个头：分数随距离的变化'],
  curvesNote: ['To the right: the key is after the query. The selected head is drawn heavy.', '向右：键在查询之后。选中的头用粗线。'],
  offset: ['Distance', '距离'],
  distance: ['Mean attention distance of each head', '每个头的平均注意距离'],
  distanceNote: ['One dot a head, layer by layer: how many tokens away it reads on average. The selected head is highlighted.', '每个点是一个头，按层排列：平均读取多远的词元。选中的头突出显示。'],
  group: ['Group', '组'],
});

const POSITIONS_TABLE = 64;

export function mountPositions(root, { store, current, onExplanation }) {
  const image = document.createElement('canvas');
  const map = makeChart('matrix-canvas', paintMap);
  const curves = makeChart('chart', paintCurves);
  const distances = makeChart('chart', paintDistances);
  let similarity = null; // {data, shape} of as many rows as columns
  let positions = {};
  let heads = [];

  const numbers = (count) => Array.from({ length: count }, (_, i) => String(i));

  // One line or dot for each head, the selected one on top.
  function headSeries(entries, points, dots) {
    const { site, head } = store.get();
    return entries.map((each) => ({ points: points(each), dots, accent: each.site === site && each.head === head }))
      .sort((a, b) => a.accent - b.accent);
  }

  function paintMap(canvas, width) {
    if (!similarity) return;
    const [count] = similarity.shape;
    const labels = numbers(count);
    const layout = matrixLayout(canvas, labels, labels, width);
    const { left, right, top } = layout;
    layout.cell = clamp((Math.min(width, 420) - left - right) / count, 1, 14);
    const size = layout.cell * count;
    paintImage(image, cellImage(similarity.data, 0, count, count, { signed: similarity.data.some((value) => value < 0) }));
    drawMatrix(canvas, {
      layout, image, rowLabels: labels, colLabels: labels, row: -1, col: -1, scrollX: 0, scrollY: 0,
      width: Math.min(width, left + size + right), height: top + size + 2,
    });
  }

  function paintCurves(canvas, width) {
    const [x, y] = ['x', 'y'].map((axis) => {
      const values = positions.curves.flatMap((curve) => curve[axis]);
      return [Math.min(...values), Math.max(...values)];
    });
    const ticks = ([low, high], digits) => [low, (low + high) / 2, high].map((value) => [value, formatNumber(value, digits)]);
    drawChart(canvas, {
      width, height: 220, x, y, xTicks: ticks(x, 0), yTicks: ticks(y, 2),
      series: headSeries(positions.curves, (curve) => curve.x.map((at, i) => [at, curve.y[i]])),
    });
  }

  // One dot for every head: layers to the right, mean distance upwards.
  function paintDistances(canvas, width) {
    const sites = [...new Set(heads.map((head) => head.site))];
    const most = Math.max(1, ...heads.map((head) => head.distance));
    const step = most > 20 ? 10 : most > 8 ? 4 : most > 4 ? 2 : 1;
    drawChart(canvas, {
      width, height: 200, x: [-0.5, sites.length - 0.5], y: [0, most * 1.05],
      series: headSeries(heads, ({ site, distance }) => [[sites.indexOf(site), distance]], true),
      xTicks: sites.map((site, i) => [i, site]),
      yTicks: numbers(most / step + 1).map((label, i) => [i * step, String(i * step)]),
    });
  }

  function paintHeads() {
    curves.paint();
    distances.paint();
  }

  // A chart with its title, a note and a table of its numbers.
  function block(key, { box }, build, hasNote = true) {
    const title = positionsText(key);
    const table = tableToggle(title, () => build(title));
    return make('div', make('h3', title), box, hasNote && make('p.quiet', positionsText(`${key}Note`)),
      make('div.controls.below', table.button), table.host);
  }

  function similarityTable() {
    const count = Math.min(POSITIONS_TABLE, similarity.shape[0]);
    return matrixTable({
      caption: positionsText('similarityCaption', { count }),
      corner: positionsText('position'),
      rowLabels: numbers(count),
      colLabels: numbers(count),
      value: (r, c) => similarity.data[r * similarity.shape[1] + c],
    });
  }

  function curvesTable(caption) {
    const offsets = new Set(positions.curves.flatMap((curve) => curve.x));
    return dataTable({
      caption,
      columns: [{ title: positionsText('offset') },
        ...positions.curves.map(({ site, head }) => ({ title: headName(site, head), number: true }))],
      // A causal layer has no curve for keys after the query.
      rows: [...offsets].sort((a, b) => a - b).map((x) =>
        [formatNumber(x, 0), ...positions.curves.map((curve) => formatNumber(curve.y[curve.x.indexOf(x)], 3))]),
    });
  }

  function distancesTable(caption) {
    const ex = current();
    return dataTable({
      caption,
      columns: [{ title: translate('heads.column.head') }, { title: positionsText('group') },
        { title: translate('heads.column.distance'), number: true }],
      rows: heads.map(({ site, head, distance }) => [headName(site, head), groupTitle(siteGroup(ex.site(site))), formatNumber(distance)]),
    });
  }

  function show(ex) {
    ({ positions } = ex);
    similarity = ex.tensor(positions.tensor);
    heads = ex.heads.filter((head) => typeof head.distance === 'number');
    // The explanation says it in English.
    const lead = currentLanguage() === 'en' ? positions.note : joinTexts([
      positionsText(`kind.${positions.kind}`),
      positions.reach > 0 && positionsText('reach', { reach: positions.reach }),
    ], '');
    setChildren(root, make('p.lead', lead), make('div.halves',
      similarity && block('similarity', map, similarityTable, false),
      positions.curves.length > 0 && block('curves', curves, curvesTable),
      heads.length > 0 && block('distance', distances, distancesTable)));
    map.paint();
    paintHeads();
  }

  root.dataset.widget = 'positions';
  onExplanation(show);
  store.subscribe((state, changed) => {
    if (changed.has('site') || changed.has('head')) paintLater(paintHeads);
  });
}
