// Runs llama.cpp by node-llama-cpp: node llama_cpp.mjs FILE THREADS.  Each line of the input is "prefill N" or "token"; the
// answer is CPU milliseconds of the process, wall milliseconds and the greedy next token.
import { createInterface } from "node:readline";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const installed = createRequire(pathToFileURL(process.cwd() + "/package.json"));
const { getLlama } = await import(pathToFileURL(installed.resolve("node-llama-cpp")).href);
const llama = await getLlama({ gpu: false, build: "never", logLevel: "error", maxThreads: Number(process.argv[3]) });
const model = await llama.loadModel({ modelPath: process.argv[2], gpuLayers: 0 });
const threads = Number(process.argv[3]);
const context = await model.createContext({ contextSize: 4096, batchSize: 512, threads });
const sequence = context.getSequence();
let token = 5;

async function next(tokens) {
  for await (const one of sequence.evaluate(tokens, { temperature: 0, yieldEogToken: true })) return one;
}

console.log(`ready ${llama.systemInfo.replaceAll("\n", " ")}`);
for await (const line of createInterface({ input: process.stdin })) {
  const [what, count] = line.split(" ");
  if (what === "prefill") await sequence.clearHistory();
  const tokens = what === "prefill" ? Array.from({ length: Number(count) }, (_, i) => 5 + i) : [token];
  const [began, used] = [performance.now(), process.cpuUsage()];
  token = await next(tokens);
  const { user, system } = process.cpuUsage(used);
  console.log(`${(user + system) / 1e3} ${performance.now() - began} ${token}`);
}
process.exit(0);
