// The validator, a badge, would be asked over the internet.
window.SwaggerUIBundle({ url: "openapi.json", dom_id: "#api", deepLinking: true, validatorUrl: null });
