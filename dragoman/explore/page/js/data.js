// An explanation as the library wrote it (dragoman/explain/schema.json), with its tensors decoded on first use.

const TENSOR_TYPES = {
  u8: Uint8Array,
  i8: Int8Array,
  u16: Uint16Array,
  u32: Uint32Array,
  i32: Int32Array,
  f32: Float32Array,
};

const dataBytes = (text) => Uint8Array.fromBase64?.(text) ?? Uint8Array.from(atob(text), (character) => character.charCodeAt(0));

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
  let at = bytes.indexOf(10) + 1;
  const json = JSON.parse(new TextDecoder().decode(bytes.subarray(0, at)));
  for (const entry of Object.values(json.tensors)) {
    const size = entry.shape.reduce((a, b) => a * b, TENSOR_TYPES[entry.dtype].BYTES_PER_ELEMENT);
    entry.bytes = bytes.slice(at, at + size);
    at += size;
  }
  return decodeExplanation(json);
}

// {data, shape, pool}: `data` has floats where the numbers were scaled, else their own type.
function decodeTensor({ dtype, code, scale, shape, pool, data: text, bytes = dataBytes(text) }) {
  let data = new TENSOR_TYPES[dtype](bytes.buffer);
  if (code === 'sqrt' || dtype === 'i8') {
    const table = Float32Array.from({ length: 256 }, (_, u) => scale * (dtype === 'i8' ? ((u << 24) >> 24) / 127 : (u / 255) ** 2));
    data = new Float32Array(bytes);
    for (let i = 0; i < data.length; i++) data[i] = table[data[i]]; // Float32Array.from takes ten times as long
  }
  return { data, shape, pool };
}

// Group that holds position i of a pooled axis; edges are group borders.
export const poolGroup = (edges, i) => (edges ? edges.findLastIndex((edge, group) => edge <= i && group < edges.length - 1) : i);

export function decodeExplanation(json) {
  const { source, target, steps } = json;
  const sites = new Map(json.sites.map((site) => [site.id, site]));
  const heads = new Map(json.heads.map((head) => [`${head.site}.${head.head}`, head]));
  const decoded = {};
  const memo = new Map();
  const remember = (key, compute) => {
    if (!memo.has(key)) memo.set(key, compute());
    return memo.get(key);
  };
  const ex = {
    ...json,
    tensors: { ...json.tensors },
    tensor: (name) => (name in ex.tensors ? decoded[name] ??= decodeTensor(ex.tensors[name]) : null),
    // An attribution that came later. If it is of target token t alone, other rows are zero and stay as they were.
    addAttribution({ attribution, tensors }, t) {
      for (const [name, tensor] of Object.entries(tensors)) {
        const known = t >= 0 && ex.tensor(name);
        if (known) {
          const row = [t * known.shape[1], (t + 1) * known.shape[1]];
          known.data.set(decodeTensor(tensor).data.subarray(...row), row[0]);
        } else {
          ex.tensors[name] = tensor;
          delete decoded[name];
        }
      }
      if (!ex.attribution.some(({ method }) => method === attribution.method)) ex.attribution.push(attribution);
      memo.clear();
    },
    site: (id) => sites.get(id),
    siteMatrix(id, measure) {
      const site = sites.get(id);
      return ex.tensor(measure === 'contribution' ? site?.contribution : site?.tensor);
    },
    headSummary: (name) => heads.get(name),
    // Change of the translation's log-probability without the head: the exact one where known.
    headEffect(name) {
      const { exact, estimate } = heads.get(name)?.effect ?? {};
      return exact ?? estimate;
    },
    crossSites: () => [...sites.values()].filter((site) => site.group === 'cross' && site.key === 'source'),
    // Attention weights of one head from target token t to the source tokens, or null.
    crossRow(id, head, t) {
      const matrix = !ex.hasClasses && sites.get(id)?.key === 'source' && ex.siteMatrix(id, 'weights');
      return matrix ? dataRow(matrix, head, t, source.tokens.length) : null;
    },
    // Steps whose attribution is still to be asked for.
    pending: new Set(json.missing.attribution && !json.attribution.length ? steps.keys() : []),
    // Whether the target is a list of classes with one step for all of them.
    hasClasses: ['classify', 'pairs'].includes(json.model.task),
    // The token that stands at step t: of a classifier, the predicted class.
    outputToken(t) {
      const { id, top } = steps[t] ?? {};
      const [, text = ''] = top?.find(([each]) => each === id) ?? top?.[0] ?? [];
      return (!ex.hasClasses && target.tokens[t]) || { text };
    },
    // Attributions that have numbers here.
    attributions: () => ex.attribution.filter((entry) => ex.tensor(entry.source)),
    // The numbers of an attribution for target token t, one for each source token, or null: they are all zero where they
    // were not computed, and for a hard choice of positions, which has no gradient. A language model has no source: it
    // reads its own text, one position earlier.
    attributionRow(entry, t) {
      const count = source.tokens.length || target.tokens.length;
      const { data, shape } = ex.tensor(source.tokens.length ? entry.source : entry.target) ?? { shape: [] };
      const row = t < shape[0] && shape[1] === count && data.subarray(t * count, (t + 1) * count);
      return row && row.some(Boolean) ? row : null;
    },
    // Cross-attention of target token t, averaged over all heads, or null.
    attentionMean: (t) => remember(`mean ${t}`, () => {
      const rows = crossRows(t);
      return rows.length ? Float32Array.from(rows[0].row, (_, i) => rows.reduce((sum, { row }) => sum + row[i], 0) / rows.length) : null;
    }),
    // How much each source token counted for target token t: attribution where there is one, else mean cross-attention.
    sourceWeights: (t) => remember(`source ${t}`, () => {
      const [entry] = ex.attributions();
      const row = entry && ex.attributionRow(entry, t);
      const sizes = row ? Float32Array.from(row, Math.abs) : ex.attentionMean(t);
      if (!sizes || !source.tokens.length) return null;
      const sum = sizes.reduce((a, b) => a + b, 0) || 1;
      const values = sizes.map((value) => value / sum);
      let strongest = -1;
      values.forEach((value, i) => {
        if (!source.tokens[i].special && !(value <= values[strongest])) strongest = i;
      });
      return { values, from: row ? 'attribution' : 'attention', strongest };
    }),
    // The cross-attention head that attends most to what counted most for token t: {name, site, head, weight, src}.
    strongestHead: (t) => remember(`head ${t}`, () => {
      const src = ex.sourceWeights(t)?.strongest ?? -1;
      const rows = src < 0 ? [] : crossRows(t);
      const weight = Math.max(...rows.map(({ row }) => row[src]));
      const best = rows.find(({ row }) => row[src] === weight);
      return best && { ...best, weight, src };
    }),
  };
  // What each cross-attention head reads for target token t: {name, site, head, row}.
  const crossRows = (t) => ex.crossSites().flatMap(({ id, heads: count }) => Array.from({ length: count }, (_, head) =>
    ({ name: `${id}.${head}`, site: id, head, row: ex.crossRow(id, head, t) }))).filter(({ row }) => row);
  return ex;
}

// Row t of head h over n keys; a pooled group's mass is spread over its members.
function dataRow({ shape: [, queries, keys], pool, data }, h, t, n) {
  const q = poolGroup(pool?.q, t);
  const start = (h * queries + q) * keys;
  if (q >= queries || (!pool && keys !== n)) return null;
  if (!pool) return data.subarray(start, start + keys);
  const row = new Float32Array(n);
  pool.k.slice(1).forEach((to, k) => row.fill(data[start + k] / (to - pool.k[k]), pool.k[k], to));
  return row;
}
