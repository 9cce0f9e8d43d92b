CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "alembic_version" VALUES('0001');
CREATE TABLE key_secrets (
	digest TEXT NOT NULL, 
	key_id TEXT NOT NULL, 
	prefix TEXT NOT NULL, 
	last4 TEXT NOT NULL, 
	created_at FLOAT NOT NULL, 
	valid_until FLOAT, 
	PRIMARY KEY (digest), 
	FOREIGN KEY(key_id) REFERENCES keys (id)
);
INSERT INTO "key_secrets" VALUES('abababababababababababababababababababababababababababababababab','key_1','sk-hr-4fQ0','x9Zk',1764000000.0,NULL);
CREATE TABLE keys (
	id TEXT NOT NULL, 
	name TEXT NOT NULL, 
	tags TEXT NOT NULL, 
	"plan" TEXT, 
	models TEXT NOT NULL, 
	rpm BIGINT, 
	tpm BIGINT, 
	concurrency BIGINT, 
	budget_micros BIGINT, 
	budget_period TEXT, 
	allowed_ips TEXT NOT NULL, 
	created_at FLOAT NOT NULL, 
	expires_at FLOAT, 
	revoked_at FLOAT, 
	PRIMARY KEY (id)
);
INSERT INTO "keys" VALUES('key_1','vllm-local-dev','["dev"]',NULL,'[]',NULL,NULL,NULL,NULL,NULL,'[]',1764000000.0,NULL,NULL);
CREATE TABLE usage_days (
	day TEXT NOT NULL, 
	key_id TEXT NOT NULL, 
	model TEXT NOT NULL, 
	upstream TEXT NOT NULL, 
	key_name TEXT NOT NULL, 
	requests BIGINT NOT NULL, 
	failed BIGINT NOT NULL, 
	estimated BIGINT NOT NULL, 
	input_tokens BIGINT NOT NULL, 
	output_tokens BIGINT NOT NULL, 
	cached_tokens BIGINT NOT NULL, 
	cost_micros BIGINT NOT NULL, 
	PRIMARY KEY (day, key_id, model, upstream)
);
INSERT INTO "usage_days" VALUES('2025-11-24','key_1','qwen','local','vllm-local-dev',1,0,0,12,5,0,3);
CREATE TABLE usage_events (
	id INTEGER NOT NULL, 
	time_s FLOAT NOT NULL, 
	key_id TEXT NOT NULL, 
	key_name TEXT NOT NULL, 
	model TEXT NOT NULL, 
	upstream TEXT NOT NULL, 
	upstream_model TEXT NOT NULL, 
	endpoint TEXT NOT NULL, 
	status INTEGER NOT NULL, 
	input_tokens BIGINT NOT NULL, 
	output_tokens BIGINT NOT NULL, 
	cached_tokens BIGINT NOT NULL, 
	cost_micros BIGINT NOT NULL, 
	estimated BOOLEAN NOT NULL, 
	stream BOOLEAN NOT NULL, 
	ttft_s FLOAT, 
	total_s FLOAT NOT NULL, 
	attempts INTEGER NOT NULL, 
	outcome TEXT NOT NULL, 
	PRIMARY KEY (id)
);
INSERT INTO "usage_events" VALUES(1,1764000100.0,'key_1','vllm-local-dev','qwen','local','qwen','chat',200,12,5,0,3,0,0,NULL,0.5,1,'ok');
CREATE TABLE versions (
	name TEXT NOT NULL, 
	value BIGINT NOT NULL, 
	PRIMARY KEY (name)
);
INSERT INTO "versions" VALUES('keys',1);
CREATE UNIQUE INDEX keys_name_in_use ON keys (name) WHERE revoked_at IS NULL;
CREATE INDEX ix_key_secrets_key_id ON key_secrets (key_id);
CREATE INDEX ix_usage_events_time_s ON usage_events (time_s);
