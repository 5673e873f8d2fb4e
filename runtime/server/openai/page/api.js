// Requests to the server's HTTP API, and its streams of server-sent events. Must not touch the document.

const KEY = "quire.key"; // key in the tab's storage

export const savedKey = () => sessionStorage.getItem(KEY) ?? "";
export const saveKey = (key) => sessionStorage.setItem(KEY, key);

export class ApiError extends Error {
  // status: of HTTP, 0 if the server did not answer. retryMs: when to try again, null if the server does not say.
  constructor(message, { status = 0, retryMs = null } = {}) {
    super(message);
    this.status = status;
    this.retryMs = retryMs;
  }
}

// Return the models that generate text, maybe none, and one that ranks texts or labels them, or null.
// state: "ready", or why a request to the model waits.
// pageSampling: what the page sends unless its reader sets others. defaultSampling: what applies to other requests.
export async function servedModels() {
  const [cards, page] = await Promise.all(["v1/models", "settings.json"].map(async (path) => (await request(path, {})).json()));
  const models = cards.data.map(({ id, capabilities, state = "ready", adapter = { loaded: true }, input_modalities: inputs = [], default_sampling_params: sampling = {}, prompt_names: prompts = [] }) => ({
    name: id,
    state: state === "ready" && !adapter.loaded ? "unloaded" : state,
    can: (what) => capabilities.includes(what),
    takesImages: inputs.includes("image"),
    defaultSampling: sampling,
    pageSampling: page.sampling[id] ?? {},
    prompts,
  }));
  return {
    generators: models.filter(({ can }) => can("completion")),
    encoder: models.find(({ can }) => can("rerank") || can("classify")) ?? null,
  };
}

// Return the answer to a request with a JSON body. Throws ApiError, and AbortError once `signal` is aborted.
export async function post(path, body, signal) {
  const headers = { "content-type": "application/json" };
  return (await request(path, { method: "POST", body: JSON.stringify(body), headers, signal })).json();
}

// Yield the events of a stream, each as an object. Throws ApiError, and AbortError once `signal` is aborted.
export async function* stream(path, body, signal) {
  const headers = { "content-type": "application/json" };
  const answer = await request(path, { method: "POST", body: JSON.stringify(body), headers, signal });
  for await (const data of eventData(answer.body)) {
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw new ApiError(event.error.message);
    yield event;
  }
  throw new ApiError("the connection was lost");
}

async function request(path, { headers = {}, ...options }) {
  const key = savedKey();
  const authorization = key ? { authorization: `Bearer ${key}` } : {};
  let answer;
  try {
    answer = await fetch(path, { cache: "no-store", ...options, headers: { ...headers, ...authorization } });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("the server does not answer");
  }
  if (!answer.ok) throw await refusal(answer);
  return answer;
}

async function refusal(answer) {
  const body = await answer.json().catch(() => null);
  const retry = answer.headers.get("retry-after-ms");
  return new ApiError(body?.error?.message ?? `the server answered ${answer.status}`, {
    status: answer.status,
    retryMs: retry === null ? null : Number(retry),
  });
}

// Yield the data of each event. The server writes the data of an event on one line.
async function* eventData(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read().catch((error) => {
        if (error.name === "AbortError") throw error;
        throw new ApiError("the connection was lost");
      });
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) if (line.startsWith("data: ")) yield line.slice("data: ".length);
    }
  } finally {
    reader.cancel().catch(() => {}); // has an effect if the reader of the events left early
  }
}
