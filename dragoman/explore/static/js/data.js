// An explanation as the library wrote it (dragoman/explain/schema.json), with its tensors decoded on first use.

const TENSOR_TYPES = {
  u8: Uint8Array,
  i8: Int8Array,
  u16: Uint16Array,
  u32: Uint32Array,
  i32: Int32Array,
  f32: Float32Array,
};

function dataBytes(text) {
  if (typeof Uint8Array.fromBase64 === 'function') return Uint8Array.fromBase64(text);
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
  return bytes;
}

// Base 85 of RFC 1924 with "." for "<": five characters hold four bytes.
function dataBase85(text) {
  const alphabet = '0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;.=>?@^_\x60{|}~';
  const codes = new Uint8Array(128).fill(84);
  for (let i = 0; i < 85; i++) codes[alphabet.charCodeAt(i)] = i;
  const bytes = new DataView(new ArrayBuffer(4 * Math.ceil(text.length / 5)));
  for (let at = 0; at < text.length; at += 5) {
    let group = 0;
    for (let i = at; i < at + 5; i++) group = group * 85 + (i < text.length ? codes[text.charCodeAt(i)] : 84);
    bytes.setUint32((at / 5) * 4, group);
  }
  return bytes.buffer.slice(0, Math.floor((text.length * 4) / 5));
}

// The explanation inside a file, as encode_island of the exporter wrote it: its JSON, a line end, the tensors' bytes.
export async function readIsland(island) {
  const stream = new Blob([dataBase85(island.textContent)]).stream().pipeThrough(new DecompressionStream('deflate'));
  const bytes = new Uint8Array(await new Response(stream).arrayBuffer());
  let at = bytes.indexOf(10);
  const json = JSON.parse(new TextDecoder().decode(bytes.subarray(0, at)));
  at += 1;
  for (const entry of Object.values(json.tensors)) {
    const size = entry.shape.reduce((a, b) => a * b, TENSOR_TYPES[entry.dtype].BYTES_PER_ELEMENT);
    entry.bytes = bytes.slice(at, at + size);
    at += size;
  }
  return json;
}

// {data, shape, pool}: floats as Float32Array, integers as Int32Array.
export function decodeTensor(entry) {
  const bytes = entry.bytes ?? dataBytes(entry.data);
  const type = TENSOR_TYPES[entry.dtype];
  const raw = new type(bytes.buffer, bytes.byteOffset, bytes.byteLength / type.BYTES_PER_ELEMENT);
  const scale = entry.scale ?? 1;
  let data;
  if (entry.dtype === 'f32') data = raw;
  else if (entry.code === 'sqrt') {
    const table = Float32Array.from({ length: 256 }, (_, u) => scale * (u / 255) ** 2);
    data = Float32Array.from(raw, (u) => table[u]);
  } else if (entry.code === 'linear' && entry.dtype === 'i8') {
    data = Float32Array.from(raw, (v) => (scale * v) / 127);
  } else data = Int32Array.from(raw);
  return { data, shape: entry.shape, pool: entry.pool ?? null };
}

// Group that holds position i of a pooled axis; edges are group borders.
export function poolGroup(edges, i) {
  if (!edges) return i;
  let low = 0;
  let high = edges.length - 2;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (edges[middle] <= i) low = middle;
    else high = middle - 1;
  }
  return low;
}

export function decodeExplanation(json) {
  const cache = new Map();
  const sites = new Map((json.sites ?? []).map((site) => [site.id, site]));
  const heads = new Map((json.heads ?? []).map((head) => [`${head.site}.${head.head}`, head]));
  const memo = new Map();
  const remember = (key, make) => {
    if (!memo.has(key)) memo.set(key, make());
    return memo.get(key);
  };
  const ex = {
    ...json,
    tensors: { ...json.tensors },
    tensor(name) {
      if (name === null || name === undefined || !(name in ex.tensors)) return null;
      if (!cache.has(name)) cache.set(name, decodeTensor(ex.tensors[name]));
      return cache.get(name);
    },
    // More tensors that came later (an attribution on demand).
    addTensors(tensors) {
      Object.assign(ex.tensors, tensors);
      for (const name of Object.keys(tensors)) cache.delete(name);
      memo.clear();
    },
    site: (id) => sites.get(id) ?? null,
    siteMatrix(id, measure) {
      const site = sites.get(id);
      if (!site) return null;
      return ex.tensor(measure === 'contribution' ? site.contribution : site.tensor);
    },
    headSummary: (name) => heads.get(name) ?? null,
    // Change of the translation's log-probability without the head: the exact one where known.
    headEffect(name) {
      const effect = heads.get(name)?.effect;
      if (!effect) return null;
      return effect.exact ?? effect.estimate ?? null;
    },
    crossSites: () => [...sites.values()].filter((site) => site.group === 'cross' && site.key === 'source'),
    // Attention weights of one head from target token t to the source tokens, or null.
    crossRow(id, head, t) {
      const site = sites.get(id);
      const matrix = site && site.key === 'source' ? ex.siteMatrix(id, 'weights') : null;
      return matrix ? dataRow(matrix, head, t, ex.source.tokens.length) : null;
    },
    // Whether the target is a list of classes with one step for all of them.
    hasClasses: ['classify', 'pairs'].includes(json.model?.task),
    // The token that stands at step t: of a classifier, the predicted class.
    outputToken(t) {
      if (!ex.hasClasses) return json.target.tokens[t] ?? { text: '', special: true };
      const id = json.steps[t]?.id;
      return json.target.tokens.find((token) => token.id === id) ?? { text: json.steps[t]?.top[0]?.[1] ?? '' };
    },
    // Cross-attention of target token t, averaged over all heads, or null.
    attentionMean: (t) => remember(`mean ${t}`, () => dataAttentionMean(ex, t)),
    // How much each source token counted for target token t: attribution where there is one, else mean cross-attention.
    sourceWeights: (t) => remember(`source ${t}`, () => dataSourceWeights(ex, t)),
    strongestHead: (t) => remember(`head ${t}`, () => dataStrongestHead(ex, t)),
  };
  return ex;
}

// Row t of head h over n keys; a pooled group's mass is spread over its members.
function dataRow(matrix, h, t, n) {
  const [, queries, keys] = matrix.shape;
  const q = poolGroup(matrix.pool?.q, t);
  if (q >= queries) return null;
  const start = (h * queries + q) * keys;
  if (!matrix.pool?.k) return keys === n ? matrix.data.subarray(start, start + keys) : null;
  const row = new Float32Array(n);
  for (let k = 0; k < keys; k++) {
    const [from, to] = [matrix.pool.k[k], matrix.pool.k[k + 1]];
    for (let i = from; i < to && i < n; i++) row[i] = matrix.data[start + k] / (to - from);
  }
  return row;
}

function dataArgMax(values, skip) {
  let best = -1;
  for (let i = 0; i < values.length; i++) {
    if (!skip(i) && (best < 0 || values[i] > values[best])) best = i;
  }
  return best;
}

function dataAttentionMean(ex, t) {
  const count = ex.source.tokens.length;
  const rows = ex.crossSites().flatMap((site) =>
    Array.from({ length: site.heads }, (_, h) => ex.crossRow(site.id, h, t)).filter(Boolean));
  if (!rows.length) return null;
  const mean = new Float32Array(count);
  for (const row of rows) for (let i = 0; i < count; i++) mean[i] += row[i] / rows.length;
  return mean;
}

function dataSourceWeights(ex, t) {
  const count = ex.source?.tokens?.length ?? 0;
  const attribution = (ex.attribution ?? []).find((each) => ex.tensor(each.source));
  const special = (i) => ex.source.tokens[i].special;
  let values = null;
  let from = null;
  if (attribution) {
    const tensor = ex.tensor(attribution.source);
    if (tensor.shape[1] === count && t < tensor.shape[0]) {
      const row = tensor.data.subarray(t * count, (t + 1) * count);
      values = Float32Array.from(row, Math.abs);
      from = 'attribution';
    }
  }
  if (!values) {
    values = ex.attentionMean(t);
    from = 'attention';
  }
  if (!values) return null;
  const sum = values.reduce((a, b) => a + b, 0) || 1;
  const parts = values.map((value) => value / sum);
  return { values: parts, from, strongest: dataArgMax(parts, special) };
}

// The cross-attention head that attends most to what counted most for token t: {name, site, head, weight, src}.
function dataStrongestHead(ex, t) {
  const weights = ex.sourceWeights(t);
  if (!weights || weights.strongest < 0) return null;
  let best = null;
  for (const site of ex.crossSites()) {
    for (let head = 0; head < site.heads; head++) {
      const row = ex.crossRow(site.id, head, t);
      if (row && (!best || row[weights.strongest] > best.weight)) {
        best = { name: `${site.id}.${head}`, site: site.id, head, weight: row[weights.strongest] };
      }
    }
  }
  return best && { ...best, src: weights.strongest };
}
