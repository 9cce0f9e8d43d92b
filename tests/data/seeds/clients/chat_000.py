from openai import OpenAI

client = OpenAI(
    base_url="https://taotoken.net/api",
    api_key="sk-你的Key",
)

resp = client.chat.completions.create(
    model="qwen2.5-7b",
    messages=[
        {"role": "system", "content": "你是一个严谨的技术助手。"},
        {"role": "user", "content": "用三句话解释 PagedAttention 的作用。"},
    ],
    temperature=0.7,
    max_tokens=512,
)
print(resp.choices[0].message.content)
