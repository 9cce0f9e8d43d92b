import concurrent.futures
from openai import OpenAI

client = OpenAI(base_url="https://taotoken.net/api", api_key="sk-your-taotoken-key")

def ask(i):
    r = client.chat.completions.create(
        model="qwen2-7b-local",
        messages=[{"role": "user", "content": f"第 {i} 个测试请求，回复 OK 即可。"}],
        max_tokens=16,
    )
    return r.choices[0].message.content

with concurrent.futures.ThreadPoolExecutor(max_workers=8) as ex:
    results = list(ex.map(ask, range(8)))
print(results)
