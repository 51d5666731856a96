// What a served page can ask its model; null in a file.

function apiBase() {
  return new URL('api/', document.baseURI).href;
}

async function apiCall(path, body) {
  const options = body === undefined ? {} : {
    method: 'POST',
    headers: { 'Content-Type': 'application/json' },
    body: JSON.stringify(body),
  };
  const response = await fetch(apiBase() + path, options);
  if (!response.ok) {
    let sentence = `${response.status} ${response.statusText}`;
    try {
      sentence = (await response.json()).error ?? sentence;
    } catch {
      // Not JSON: the status line is all there is.
    }
    throw new Error(sentence);
  }
  return response;
}

function createApi() {
  let digest = '';
  const here = (path) => `e/${encodeURIComponent(digest)}/${path}`;
  const json = async (path, body) => (await apiCall(path, body)).json();
  return {
    session: () => json('session'),
    load: (which) => json(`e/${encodeURIComponent(which)}`),
    // The explanation that the calls below are about.
    use(which) {
      digest = which;
    },
    explain: (request) => json('explain', request),
    branch: (step, token) => json(here('branch'), { step, token }),
    off: (heads) => json(here('off'), { heads }),
    attribute: (method) => json(here('attribute'), { method }),
    // Exact effect of every head, one call of onHead(name, exact) as each arrives.
    async effects(onHead) {
      const response = await apiCall(here('effects'), {});
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      let rest = '';
      for (;;) {
        const { value, done } = await reader.read();
        const lines = (rest + (value ?? '')).split('\n');
        rest = done ? '' : lines.pop();
        for (const line of lines) {
          if (!line.trim()) continue;
          const entry = JSON.parse(line);
          if (entry.error) throw new Error(entry.error);
          onHead(entry.head, entry.exact);
        }
        if (done) return;
      }
    },
    // Exact weights of one head: {data: Float32Array, shape: [rows, columns]}.
    async tensor(name, h, q, k) {
      const query = `h=${h}&q=${q[0]}-${q[1]}&k=${k[0]}-${k[1]}`;
      const response = await apiCall(here(`tensor/${encodeURIComponent(name)}?${query}`));
      const shape = (response.headers.get('X-Shape') ?? '').split(/[,x ]+/).filter(Boolean).map(Number);
      return { data: new Float32Array(await response.arrayBuffer()), shape };
    },
  };
}

export const api = document.getElementById('explanation') ? null : createApi();
