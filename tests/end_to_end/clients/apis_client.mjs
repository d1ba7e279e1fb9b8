// Responses and Messages in JavaScript, under node: the `openai` client, Anthropic's, and the AI SDK by its defaults.
import assert from "node:assert/strict";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import Anthropic from "@anthropic-ai/sdk";
import { generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";
import OpenAI from "openai";

const URL_ = process.env.DOOR_URL;
const ROOT = URL_.replace(/\/v1$/, "");
const KEY = process.env.DOOR_KEY;
const CALLS_TOOLS = process.env.DOOR_CALLS_TOOLS === "1";
const MODEL = "small";
const openai = new OpenAI({ baseURL: URL_, apiKey: KEY, maxRetries: 0, timeout: 60_000 });
const anthropic = new Anthropic({ baseURL: ROOT, apiKey: KEY, maxRetries: 0, timeout: 60_000 });
const byResponses = createOpenAI({ baseURL: URL_, apiKey: KEY })(MODEL);
const byMessages = createAnthropic({ baseURL: URL_, apiKey: KEY })(MODEL);
const WORDS = "say git is a tool";
const CALL = 'call look {"at": "a wall"}';
const PLACE = { type: "object", properties: { at: { type: "string" } }, required: ["at"], additionalProperties: false };

async function collected(stream) {
  const events = [];
  for await (const event of stream) events.push(event);
  return events;
}

const checks = {
  async responses_whole_and_streamed() {
    const asked = { model: MODEL, input: WORDS, instructions: "Be short.", max_output_tokens: 12, temperature: 0 };
    const whole = await openai.responses.create(asked);
    assert.ok(whole.output_text.length > 0 && whole.usage.input_tokens > 0);
    const events = await collected(await openai.responses.create({ ...asked, stream: true }));
    const text = events.filter((event) => event.type === "response.output_text.delta").map((event) => event.delta);
    assert.equal(text.join(""), whole.output_text);
    assert.equal(events[0].type, "response.created");
    assert.match(events.at(-1).type, /^response\.(completed|incomplete)$/);
    await assert.rejects(openai.responses.create({ ...asked, previous_response_id: "resp_1" }), OpenAI.BadRequestError);
  },

  async messages_whole_and_streamed() {
    const turns = [{ role: "user", content: WORDS }];
    const asked = { model: MODEL, max_tokens: 12, messages: turns, system: "Be short.", temperature: 0 };
    const whole = await anthropic.messages.create(asked);
    assert.ok(whole.content[0].text.length > 0);
    const stream = anthropic.messages.stream(asked);
    assert.equal(await stream.finalText(), whole.content[0].text);
    assert.ok((await anthropic.messages.countTokens({ model: MODEL, messages: turns })).input_tokens > 0);
    const unknown = anthropic.messages.create({ ...asked, model: "claude" });
    await assert.rejects(unknown, Anthropic.NotFoundError);
  },

  async the_ai_sdk_by_responses() {
    const asked = { model: byResponses, prompt: WORDS, system: "Be short.", maxOutputTokens: 12, maxRetries: 0 };
    const whole = await generateText({ ...asked, temperature: 0 });
    assert.ok(whole.text.length > 0 && whole.usage.inputTokens > 0);
    const streamed = streamText({ ...asked, temperature: 0 });
    assert.equal((await collected(streamed.textStream)).join(""), whole.text);
    assert.equal((await streamed.usage).outputTokens, whole.usage.outputTokens);
  },

  async the_ai_sdk_by_messages() {
    const asked = { model: byMessages, prompt: WORDS, system: "Be short.", maxOutputTokens: 12, maxRetries: 0 };
    const whole = await generateText({ ...asked, temperature: 0 });
    assert.ok(whole.text.length > 0 && whole.usage.inputTokens > 0);
    const streamed = streamText({ ...asked, temperature: 0 });
    assert.equal((await collected(streamed.textStream)).join(""), whole.text);
  },

  async the_ai_sdk_goes_on_with_a_conversation() {
    // By default it refers to stored turns; where nothing is stored it is to say so.
    const options = { openai: { store: false } };
    const first = await generateText({ model: byResponses, prompt: "say one", maxOutputTokens: 4, providerOptions: options });
    const messages = [
      { role: "user", content: "say one" }, ...first.response.messages, { role: "user", content: "say two" },
    ];
    const asked = { model: byResponses, messages, maxOutputTokens: 4, maxRetries: 0 };
    assert.ok((await generateText({ ...asked, providerOptions: options })).text);
    await assert.rejects(generateText(asked), /`store`/);
  },
};

const ofTools = {
  async responses_call_tools() {
    const tools = [{ type: "function", name: "look", parameters: PLACE, strict: false }];
    const input = [{ role: "user", content: CALL }];
    const stream = openai.responses.stream({ model: MODEL, input, tools });
    const first = await stream.finalResponse();
    const call = first.output[0];
    assert.deepEqual([call.type, call.name, JSON.parse(call.arguments)], ["function_call", "look", { at: "a wall" }]);
    input.push(...first.output, { type: "function_call_output", call_id: call.call_id, output: "white" });
    assert.equal((await openai.responses.create({ model: MODEL, input, tools })).output_text, "heard white");
  },

  async messages_call_tools() {
    const tools = [{ name: "look", input_schema: PLACE }];
    const messages = [{ role: "user", content: CALL }];
    const first = await anthropic.messages.stream({ model: MODEL, max_tokens: 99, messages, tools }).finalMessage();
    assert.equal(first.stop_reason, "tool_use");
    assert.deepEqual(first.content[0].input, { at: "a wall" });
    const result = { type: "tool_result", tool_use_id: first.content[0].id, content: "white" };
    messages.push({ role: "assistant", content: first.content }, { role: "user", content: [result] });
    const last = await anthropic.messages.create({ model: MODEL, max_tokens: 99, messages, tools });
    assert.equal(last.content[0].text, "heard white");
  },

  async the_ai_sdk_calls_tools() {
    const look = tool({ inputSchema: jsonSchema(PLACE), execute: async ({ at }) => `${at} is white` });
    for (const model of [byResponses, byMessages]) {
      const asked = { model, prompt: CALL, tools: { look }, stopWhen: stepCountIs(3), maxRetries: 0 };
      const whole = await generateText(asked);
      assert.match(whole.text, /^heard .*a wall is white/);
      assert.equal(whole.steps.length, 2);
      const streamed = streamText(asked);
      assert.match((await collected(streamed.textStream)).join(""), /^heard .*a wall is white/);
    }
  },
};

const became = {};
for (const [name, run] of Object.entries({ ...checks, ...(CALLS_TOOLS ? ofTools : {}) })) {
  try {
    await run();
    became[name] = "ok";
  } catch (error) {
    became[name] = String(error.stack ?? error);
  }
}
process.stdout.write(JSON.stringify(became));
