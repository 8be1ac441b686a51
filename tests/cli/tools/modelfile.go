// Renders a Modelfile's template with Go's own text/template, as Ollama does: a map with the
// messages, and missing keys are empty. Reads {"template": ..., "talks": [[{"role": ..., "content": ...}]]}
// and writes the texts as JSON, null where the template fails.
package main

import (
	"encoding/json"
	"os"
	"strings"
	"text/template"
)

type message struct {
	Role    string
	Content string
}

func main() {
	var given struct {
		Template string
		Talks    [][]message
	}
	if err := json.NewDecoder(os.Stdin).Decode(&given); err != nil {
		panic(err)
	}
	parsed := template.Must(template.New("").Option("missingkey=zero").Parse(given.Template))
	texts := []*string{}
	for _, talk := range given.Talks {
		var text strings.Builder
		if err := parsed.Execute(&text, map[string]any{"Messages": talk, "Response": ""}); err != nil {
			texts = append(texts, nil)
			continue
		}
		written := text.String()
		texts = append(texts, &written)
	}
	if err := json.NewEncoder(os.Stdout).Encode(texts); err != nil {
		panic(err)
	}
}
