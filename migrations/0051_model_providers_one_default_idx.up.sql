set local lock_timeout = '500ms';

create unique index if not exists model_providers_one_default_idx on model_providers (workspace_id) where is_default;
