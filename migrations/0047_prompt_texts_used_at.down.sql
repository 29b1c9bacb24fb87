set local lock_timeout = '500ms';

alter table prompt_texts drop column used_at;
