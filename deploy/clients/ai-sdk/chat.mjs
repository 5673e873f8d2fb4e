// The Vercel AI SDK with a Quire server: a chat, a stream, an answer that matches a schema, and a tool call.
//
// usage: node chat.mjs [URL]    npm install
// server: quire serve --served-model-name quire --tool-call-parser hermes  # the parser is for the bundled model only

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, streamText, tool } from "ai";
import { z } from "zod";

const quire = createOpenAICompatible({
  name: "quire",
  baseURL: process.argv[2] ?? "http://127.0.0.1:8000/v1",
  apiKey: "none", // the server's key, if it has keys
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const options = { model: quire("quire"), maxOutputTokens: 120, temperature: 0 }; // the served model's name

const chat = await generateText({ ...options, prompt: "What is a queue?" });
console.log("chat:", chat.text, chat.usage);

process.stdout.write("stream: ");
const stream = streamText({ ...options, prompt: "What is a stack?" });
for await (const text of stream.textStream) process.stdout.write(text);
console.log("", await stream.usage);

const schema = z.object({ name: z.string().max(20), size: z.enum(["small", "large"]) });
const { output } = await generateText({ ...options, prompt: "Name a module.", output: Output.object({ schema }) });
console.log("schema:", output);

const weather = tool({
  description: "Return the weather of a city.",
  inputSchema: z.object({ city: z.enum(["Paris", "Rome"]) }),
  execute: async ({ city }) => `It rains in ${city}.`,
});
const { toolResults } = await generateText({
  ...options,
  prompt: "How is the weather?",
  tools: { weather },
  toolChoice: "required",
  providerOptions: { quire: { parallel_tool_calls: false } },
});
console.log("tool:", toolResults.map((result) => result.output));
